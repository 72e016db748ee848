"""Rereads settings while the server runs: some change at once, others need a restart.

Plain data and the checks of files; it must not know processes. Invariant: every process can apply the settings that
`check_reload` returns without failing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from wicore_trt.access.admission import Admission
from wicore_trt.access.listening import read_tls
from wicore_trt.config import KEYS, LoadedSettings, value_of
from wicore_trt.errors import ConfigError

LIVE = frozenset(
    (
        *("server.keys_file", "server.api_key", "server.requests_per_minute", "server.tokens_per_minute"),
        *("server.cors_origins", "server.allowed_hosts", "server.tls_cert", "server.tls_key", "log.level"),
    )
)
"""Settings that change while the server runs. Of the files that these name the contents are read again, too."""
TERMINAL = "/dev/tty"


def check_reload(
    given: LoadedSettings, read: Callable[[], LoadedSettings]
) -> tuple[LoadedSettings, tuple[str, ...], tuple[str, ...]]:
    """Compute the change from the running settings to those written now: settings to apply, the keys that change now,
    and the keys that differ but need a restart. Raises ConfigError for wrong settings or files."""
    written = read()
    running, wanted = given.settings, written.settings
    differ = [key for key in KEYS if value_of(wanted, key) != value_of(running, key)]
    changed = tuple(key for key in differ if key in LIVE)
    restart = [key for key in differ if key not in LIVE]
    server = replace(
        running.server, **{k.rpartition(".")[2]: value_of(wanted, k) for k in changed if k.startswith("server.")}
    )
    if (server.tls_cert is None) != (running.server.tls_cert is None):
        raise ConfigError("TLS cannot be switched on or off while the server runs.", fix="Start it again.")
    Admission.from_settings(server)
    read_tls(server)
    if (server.api_key, server.keys_file) == (None, None) != (running.server.api_key, running.server.keys_file):
        raise ConfigError("A server with API keys is not opened to everybody while it runs.", fix="Start it again.")
    log = replace(running.log, level=wanted.log.level)
    sources = {key: where for key in KEYS if (where := (given if key in restart else written).sources.get(key))}
    return LoadedSettings(replace(running, server=server, log=log), sources), changed, tuple(restart)


def has_terminal() -> bool:
    """Tell whether this process has a controlling terminal that is still open."""
    try:
        os.close(os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
