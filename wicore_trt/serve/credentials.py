"""TLS files as gRPC takes them. Must not know services; what the files must be is `access.listening`'s to say.

Invariant: a connection is shaken hands with by the newest certificate that was good.
"""

from __future__ import annotations

import grpc

from wicore_trt.access.listening import read_tls


class Certificates:
    """What servers show of themselves, and may change while they listen."""

    def __init__(self, cert: str | None, key: str | None, client_ca: str | None) -> None:
        """PEM files; with `client_ca` clients must show a certificate.

        Raises ConfigError for a missing, unreadable, malformed or mismatched file.
        """
        self._clients = client_ca is not None
        self._newest = _configuration(cert, key, client_ca)

    def change(self, cert: str | None, key: str | None, client_ca: str | None) -> None:
        """Show others to who comes from now on. Raises ConfigError as the constructor does, and changes nothing."""
        self._newest = _configuration(cert, key, client_ca)

    def credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for a server, None without files."""
        if self._newest is None:
            return None
        return grpc.dynamic_ssl_server_credentials(self._newest, self._fetch, self._clients)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks before each handshake, and takes over what differs from what it has."""
        return self._newest


def _configuration(
    cert: str | None, key: str | None, client_ca: str | None
) -> grpc.ServerCertificateConfiguration | None:
    files = read_tls(cert, key, client_ca)
    if files is None:
        return None
    return grpc.ssl_server_certificate_configuration([(files.secret, files.chain)], root_certificates=files.roots)
