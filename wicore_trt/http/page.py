"""Serve the page at GET /: a fixed table of files, read once.

Must not know routes, keys or engines: the page calls the routes as any client does. Invariants: only the files of
this table are answered, whatever a path says; the page loads nothing from another host, and runs no inline script or
style.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from importlib.resources import files

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PREFIX = "/page/"
INDEX = "index.html"
VENDOR = "vendor"
"""Files there have their version in the name, so that browsers may keep them."""
MEDIA = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".txt": "text/plain; charset=utf-8",
}  # fmt: skip
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURE = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
}  # fmt: skip


class Asset:
    def __init__(self, content: bytes, media: str, *, lasting: bool = False) -> None:
        self._content = content
        self.etag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
        self._headers = {
            **SECURE,
            "content-type": media,
            "etag": self.etag,
            "cache-control": "public, max-age=31536000, immutable" if lasting else "no-cache",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = Headers(scope=scope).get("if-none-match", "")
        if known == "*" or self.etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            headers = {name: value for name, value in self._headers.items() if name != "content-type"}
            await Response(None, 304, headers)(scope, receive, send)
            return
        await Response(self._content, 200, self._headers)(scope, receive, send)


@cache
def load_assets() -> Mapping[str, Asset]:
    found: dict[str, Asset] = {}
    static = files("wicore_trt.http").joinpath("static")
    for prefix, folder in ((PREFIX, static), (f"{PREFIX}{VENDOR}/", static.joinpath(VENDOR))):
        for entry in folder.iterdir():
            if media := MEDIA.get(f".{entry.name.rpartition('.')[2]}"):
                found[prefix + entry.name] = Asset(entry.read_bytes(), media, lasting=folder is not static)
    found["/"] = found.pop(PREFIX + INDEX)
    return found
