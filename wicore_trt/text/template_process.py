"""Run chat templates in the process that renders them, which serves all tokenizers.

Knows the protocol of `text.template_worker` and must not know messages. Invariant: no template takes more of this
process than the text of its answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from wicore_trt.text.template_worker import LIMITS
from wicore_trt.worker_process import JobFailure, WorkerProcess

WORKER = WorkerProcess("wicore_trt.text.template_worker", LIMITS)


def run_template(source: str, tokens: Mapping[str, str], values: Mapping[str, Any] | None) -> dict[str, str]:
    """Render `values` and `tokens` with a template; with `values` None list the names that it reads, one a line.
    Returns {"text"}, {"refused"} when it called raise_exception, or {"broken"}: why it has no text, as the end of a
    sentence. {"ended"} is added where the worker had to be ended."""
    job = json.dumps({"source": source, "tokens": dict(tokens), "values": values}, ensure_ascii=False)
    try:
        answer = WORKER.run_job(job.encode("utf-8", "surrogatepass"))
    except JobFailure as failure:
        return {"broken": str(failure), **({"ended": "1"} if failure.ended else {})}
    return {"text" if answer[:1] == b"t" else "refused": answer[1:].decode("utf-8", "surrogatepass")}
