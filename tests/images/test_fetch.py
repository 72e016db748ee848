"""Images by URL come from the operator's hosts at public addresses alone, in bounded time and bytes."""

from __future__ import annotations

import base64
import io
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trustme
from PIL import Image

from wicore_trt.errors import InvalidRequestError
from wicore_trt.images import fetch
from wicore_trt.images.files import MAX_FILE, read_image_url
from wicore_trt.images.prepare import prepare_image
from wicore_trt.types import ImageFile, ImageInfo

BODY = b"an image" * 1000


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        seen = self.server.seen  # type: ignore[attr-defined]
        seen.append((self.path, self.headers["Host"]))
        kind, _, rest = self.path[1:].partition("/")
        match kind:
            case "ok":
                self.answer(200, BODY)
            case "status":
                self.answer(int(rest), BODY)
            case "to":
                self.answer(302, b"", Location=rest)
            case "big":
                self.answer(200, b"x" * (MAX_FILE + 1))
            case "drip":
                self.send_response(200)
                self.end_headers()
                while True:  # until the client leaves
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            case "header":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                while True:  # until the client leaves
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            case "junk":
                self.wfile.write(b"SSH-2.0 \0\xff\r\n" * 20)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A server on this machine, whose address counts as public."""
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def get(url: str, *hosts: str) -> bytes:
    return fetch.fetch_image(read_image_url(url, "f"), hosts).data


def refuse(url: str, said: str, *hosts: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        get(url, *hosts)
    assert caught.value.field == "f"


PRIVATE = """127.0.0.1 127.9.9.9 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 192.0.2.1 198.18.0.1
    224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::a00:1 2002:7f00:1::
    2001:0:1::1 fe80::1 fe80::1%lo fc00::1 fd00:ec2::254 fec0::1 ff02::1 2001:db8::1"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not fetch.is_public(address)
    assert fetch.is_public("8.8.8.8") and fetch.is_public("2606:4700::1111")


def test_this_machine_is_not_reached_even_where_its_name_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"2130706433:{port}", f"[::ffff:127.0.0.1]:{port}"):
            refuse(f"http://{host}/", "not a public address|cannot be fetched", "*")
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_one_look_up_decides_and_each_of_its_addresses_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, dialled = [], []

    def resolve(host: str, port: int, **_: object) -> list[tuple]:
        asked.append(host)
        addresses = {"a.org": ["8.8.8.8"], "b.org": ["8.8.8.8", "127.0.0.1"]}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    def dial(address: tuple[str, int], timeout: float) -> socket.socket:
        dialled.append(address)
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", dial)
    refuse("http://A.org./x", "cannot be fetched: no", "a.org")
    refuse("https://b.org/x", "b.org is not a public address", "*.org")
    assert asked == ["a.org", "b.org"] and dialled == [("8.8.8.8", 80)]


def test_hosts_redirects_and_answers(site: ThreadingHTTPServer) -> None:
    here = f"127.0.0.1:{site.server_port}"
    image = fetch.fetch_image(ImageFile(url=f"http://{here}/ok/?a=b#c", crops=True, field="f"), [here])
    assert image == ImageFile(data=BODY, crops=True, field="f")
    assert site.seen == [("/ok/?a=b", here)]  # type: ignore[attr-defined]
    for hosts in ((), ("127.0.0.1",), ("example.org",), (f"*.{here}",)):
        refuse(f"http://{here}/ok", "not fetched here.*server.image_hosts", *hosts)
    refuse(f"http://user:key@{here}/ok", "not fetched here", "*")
    assert len(site.seen) == 1  # type: ignore[attr-defined]
    assert get(f"http://{here}/to//to//to//ok", "*") == get(f"http://{here}/to/http://{here}/ok", here) == BODY
    refuse(f"http://{here}/to//to//to//to//ok", "leads on more than 3 times", "*")
    refuse(f"http://{here}/to/http://localhost:{site.server_port}/ok", "'localhost:.*not fetched here", here)
    refuse(f"http://{here}/to/http://10.0.0.1/ok", "10.0.0.1 is not a public address", "*")
    for place in ("file:///etc/passwd", "ftp://example.org/a", "http://[/", "data:image/png;base64,AAAA"):
        refuse(f"http://{here}/to/{place}", "not fetched here|cannot be fetched|status 302", "*")
    refuse(f"http://{here}/status/404", "status 404", here)
    refuse(f"http://{here}/big", "more than 20 MiB", here)
    refuse(f"http://{here}/junk", "cannot be fetched", here)
    refuse(f"http://{here}/nothing", "cannot be fetched", here)
    refuse(f"http://{here}:99999/", "not fetched here|cannot be fetched", "*")


def test_a_slow_server_is_left(site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_SECONDS", 0.4)
    for page in ("drip", "header"):
        refuse(f"http://127.0.0.1:{site.server_port}/{page}", "cannot be fetched", "*")


def test_https_is_verified(site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    site.socket = context.wrap_socket(site.socket, server_side=True)
    url = f"https://127.0.0.1:{site.server_port}/ok"
    refuse(url, "certificate", "*")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    monkeypatch.setattr(ssl, "create_default_context", lambda: trusting)
    assert get(url, "*") == BODY
    refuse(url.replace("127.0.0.1", "localhost"), "cannot be fetched|Hostname mismatch", "*")


def test_data_urls() -> None:
    """They are decoded by whoever decodes the image, whose pixels they give; others are refused at once."""
    out = io.BytesIO()
    Image.frombytes("RGB", (9, 7), bytes(range(189))).save(out, "PNG")
    info, text = ImageInfo(14, 1, 1, 2, 3), base64.b64encode(out.getvalue()).decode()
    want = prepare_image(ImageFile(data=out.getvalue()), info).pixels
    percent = "".join(f"%{byte:02x}" for byte in out.getvalue())
    for url in (
        f"data:image/png;base64,{text}", f"DATA:;BASE64,{text}", f"data:image/png;base64,{text.rstrip('=')}",
        f"data:a/b;base64,{text[:8]}\n {text[8:]}", f"data:,{percent}", f"data:;base64,{text.replace('+', '%2B')}",
    ):  # fmt: skip
        image = read_image_url(url, "f")
        assert not image.remote and prepare_image(fetch.fetch_image(image, ()), info).pixels == want
    wrong = ["data:image/png;base64,", "data:image/png;base64", "data:image/png;base64,@@", "data:,\u00e9"]
    wrong += ["data:image/png;base64,A", "data:image/png;base64,AAAA=AAA", "data:,plain%20text"]
    wrong += ["file:///etc/passwd", "ftp://a/b", "image.png", "", "http:" + "a" * 5000]
    for url in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            prepare_image(read_image_url(url, "f"), info)
        assert caught.value.field == "f" and len(str(caught.value)) < 300
    with pytest.raises(InvalidRequestError, match="20 MiB"):
        prepare_image(read_image_url("data:;base64," + "A" * (MAX_FILE * 4 // 3 + 8), "f"), info)
