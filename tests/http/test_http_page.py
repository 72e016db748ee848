"""The page's files: headers, caching, media types, and that nothing else is ever answered."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from web import serving

from wicore_trt.http.page import MEDIA, VENDOR, load_assets

FOLDER = Path(__file__).parents[2] / "wicore_trt" / "http" / "static"
KEY = "the-operators-own-key"


async def test_every_file_is_answered_without_a_key_as_what_it_is():
    async with serving(api_key=KEY) as running:
        for path in load_assets():
            found = await running.client.get(path)
            file = FOLDER / (path.removeprefix("/page/") if path != "/" else "index.html")
            assert found.status_code == 200 and found.content == file.read_bytes(), path
            assert found.headers["content-type"] == MEDIA[file.suffix]
            policy = found.headers["content-security-policy"]
            assert "default-src 'self'" in policy and "unsafe" not in policy and "trusted-types 'none'" in policy
            assert found.headers["x-content-type-options"] == "nosniff" and found.headers["x-request-id"]
            lasting = "immutable" in found.headers["cache-control"]
            assert lasting == (VENDOR in path) and (lasting or found.headers["cache-control"] == "no-cache")
            head = await running.client.head(path)
            assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", found.headers["etag"])
        assert len(load_assets()) == len([p for p in FOLDER.rglob("*") if p.is_file()]) >= 12


async def test_what_a_browser_has_is_not_sent_again():
    async with serving() as running:
        tag = (await running.client.get("/")).headers["etag"]
        for known in (tag, f'W/{tag}, "x"', f'"x", {tag}', "*"):
            found = await running.client.get("/", headers={"if-none-match": known})
            assert (found.status_code, found.content, found.headers["etag"]) == (304, b"", tag), known
        found = await running.client.get("/", headers={"if-none-match": '"another"'})
        assert found.status_code == 200 and found.content
        assert len({asset.etag for asset in load_assets().values()}) == len(load_assets())


PATHS = (
    *("/page", "/page/", "/page/index.html", "/page/../app.py", "/page/vendor/../../app.py", "/page/%2e%2e/app.py"),
    *("/page/..%2fapp.py", "/page/vendor", "//etc/passwd", "/page//etc/passwd", "/page/app.js/", "/page/app.js%00"),
)


@pytest.mark.parametrize("path", PATHS)
async def test_other_paths_are_not_there(path):
    """Sent as they are: clients tidy paths up."""
    async with serving() as running:
        reader, writer = await asyncio.open_connection(*running.address)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 404") and b"root:" not in answer, answer


async def test_a_file_is_only_read():
    async with serving() as running:
        assert (await running.client.post("/", json={})).status_code == 405
        assert (await running.client.put("/page/app.js", content=b"x")).status_code == 405


def test_the_page_names_no_other_host_and_has_nothing_inline():
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", index)
    for name in re.findall(r'(?:src|href)="([^"]+)"', index):
        assert name in load_assets(), name
    for file in FOLDER.glob("*.js"):
        text = file.read_text()
        assert not re.search(r"https?://|innerHTML|dangerouslySetInnerHTML|eval\(|document\.write", text), file
        assert text.startswith("// ") and set(re.findall(r'from "([^"]+)"', text)) <= set(load_assets())


def test_what_is_vendored_has_its_licence():
    text = (FOLDER / VENDOR / "LICENSES.txt").read_text()
    for file in (FOLDER / VENDOR).iterdir():
        assert file.suffix == ".txt" or file.name in text
    assert text.count("Permission is hereby granted") == 2 and "Apache License" in text


async def test_latencies_are_an_operators(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"alice:alice-key-0123456789\nops:{KEY}:operator\n")
    keys.chmod(0o600)
    async with serving(keys_file=str(keys)) as running:
        mine, ops = {"x-api-key": "alice-key-0123456789"}, {"x-api-key": KEY}
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        assert (await running.post("/v1/completions", body, headers=mine)).status_code == 200
        assert "latency" not in (await running.client.get("/v1/stats", headers=mine)).json()
        seen = (await running.client.get("/v1/stats", headers=ops)).json()["latency"]
        assert sum(seen["first_token"]["counts"]) == 1 and sum(seen["inter_token"]["counts"]) == 4
        assert all(len(s["counts"]) == len(s["bounds_s"]) + 1 for s in seen.values())
