"""Fetch images by their URLs from the hosts that the operator allows.

Must not know what an image is. Invariant: no URL reaches an address of a private network, this machine or what else is
not public, whatever names resolve to and wherever redirects lead; a fetch ends in time and takes bounded bytes.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from urllib.parse import urljoin, urlsplit

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.images.files import MAX_FILE, check_size
from wicore_trt.types import ImageFile

FETCH_SECONDS = 10.0
MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_UNICAST, _6TO4 = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("2002::/16")


def fetch_image(image: ImageFile, hosts: Collection[str]) -> ImageFile:
    """Fetch an image's URL; one that is not `remote` is returned as it is. `hosts` are names, or patterns such as
    *.example.org and *, with a port where it is not the scheme's own. Takes at most FETCH_SECONDS, but for the
    resolver's time. Raises InvalidRequestError."""
    if not image.remote:
        return image
    url, until = image.url, time.monotonic() + FETCH_SECONDS
    for _ in range(1 + MAX_REDIRECTS):
        try:
            status, place, data = _get_once(url, hosts, image.field, until)
            if time.monotonic() >= until:
                raise TimeoutError(f"it takes more than {FETCH_SECONDS:g} s")
            url = urljoin(url, place)
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise InvalidRequestError(f"The image's URL cannot be fetched: {why}.", field=image.field) from None
        if status == 200 and data:
            return replace(image, url="", data=data)
        if status not in (301, 302, 303, 307, 308) or not place:
            raise InvalidRequestError(f"The image's URL was answered with status {status}.", field=image.field)
    raise InvalidRequestError(f"The image's URL leads on more than {MAX_REDIRECTS} times.", field=image.field)


def _get_once(url: str, hosts: Collection[str], field: str, until: float) -> tuple[int, str, bytes]:
    """Get a URL; return (status, place of a redirect, bytes of a body with status 200)."""
    parts = urlsplit(url)
    host, scheme = (parts.hostname or "").rstrip("."), parts.scheme
    port = parts.port or _PORTS.get(scheme, 0)
    name = host if port == _PORTS.get(scheme) else f"{host}:{port}"
    if not host or scheme not in _PORTS or "@" in parts.netloc or not any(fnmatchcase(name, h.lower()) for h in hosts):
        fix = "Send the image's bytes, as a data: URL, or have the operator add the host to server.image_hosts."
        raise InvalidRequestError(f"Images from {shown(name)} are not fetched here.", field=field, fix=fix)
    address, left = find_public_address(host, port), max(1e-3, until - time.monotonic())
    connection = http.client.HTTPConnection(host, port)
    sock = socket.create_connection((address, port), left)  # which no second look-up can change

    def shut_socket() -> None:  # of a server that sends a byte now and then
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    late = threading.Timer(left, shut_socket)
    late.daemon = True
    try:
        late.start()
        if scheme == "https":
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            sock.do_handshake()
        connection.sock = sock
        target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        agent = {"Host": parts.netloc, "User-Agent": "wicore", "Accept": "image/*", "Accept-Encoding": "identity"}
        connection.request("GET", target, headers=agent)
        answer = connection.getresponse()
        data = answer.read(MAX_FILE + 1) if answer.status == 200 else b""
        check_size(len(data), field)
        return answer.status, answer.headers.get("Location", ""), data
    finally:
        late.cancel()
        connection.close()
        sock.close()


def find_public_address(host: str, port: int) -> str:
    """Resolve a host to an address to connect to. Raises OSError unless all its addresses are public."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(map(is_public, found)):
        raise OSError(f"{host} is not a public address")
    return found[0]


def is_public(address: str) -> bool:
    """Tell whether an address is of the public Internet: no private, loopback, link-local, reserved or multicast one,
    nor one of IPv6 that stands for one of IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast and not ip.is_reserved
    return ip.is_global and ip in _UNICAST and ip not in _6TO4
