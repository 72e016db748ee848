"""LangChain sends an image; prints the answer between bars."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model=os.environ["MODEL"], base_url=f"{os.environ['BASE_URL']}/v1", api_key="none", max_retries=0, temperature=0,
    max_tokens=8,
)  # fmt: skip
data = base64.b64encode(Path(os.environ["PICTURE"]).read_bytes()).decode()
image = {"type": "image", "base64": data, "mime_type": "image/png"}
answer = model.invoke([{"role": "user", "content": [{"type": "text", "text": "use"}, image]}])
print(f"|{answer.content}|")
