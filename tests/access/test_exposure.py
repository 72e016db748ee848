"""What may listen where other machines reach it."""

from __future__ import annotations

import pytest

from wicore_trt.access.calls import check_host
from wicore_trt.access.listening import check_exposure
from wicore_trt.config import ServerSettings
from wicore_trt.errors import ConfigError, ForbiddenError

KEY, TLS = {"api_key": "k" * 20}, {"tls_cert": "cert.pem", "tls_key": "key.pem"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "unix:/tmp/socket"])
def test_this_machine_alone_needs_nothing(host):
    check_exposure(ServerSettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
@pytest.mark.parametrize("field", ["host", "http_host", "admin_host"])
def test_others_need_keys_and_tls(host, field):
    at = {field: host, "admin_port": 9000}
    for missing, found in {"no API keys": TLS, "no TLS": KEY, "has no API": {}}.items():
        with pytest.raises(ConfigError, match=missing) as raised:
            check_exposure(ServerSettings(**at, **found))
        assert "--insecure" in raised.value.fix
        check_exposure(ServerSettings(**at, **found, insecure=True))
    check_exposure(ServerSettings(**at, **KEY, **TLS))
    check_exposure(ServerSettings(**at, **TLS, tls_client_ca="ca.pem"))


def test_http_that_is_not_served_exposes_nothing():
    check_exposure(ServerSettings(http_host="0.0.0.0", admin_host="0.0.0.0", http_port=None))
    with pytest.raises(ConfigError):
        check_exposure(ServerSettings(host="0.0.0.0", http_port=None))


OWN = ("localhost", "LOCALHOST:8000", "a.localhost:1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.1.2.3", None)
OTHERS = ("evil.example.org", "evil.example.org:8000", "localhost.example.org", "127.0.0.1.example.org", "[x]:1")


@pytest.mark.parametrize("host", OWN)
def test_own_names_and_addresses_are_answered(host):
    check_host(host, ())


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_not_unless_they_are_allowed(host):
    with pytest.raises(ForbiddenError, match=r"server\.allowed_hosts"):
        check_host(host, ("chat.example.org",))
    check_host(host, ("*",))
    check_host("chat.example.org:80", ("chat.example.org",))
