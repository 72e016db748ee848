"""TLS files as gRPC takes them. Must not know services; what the files must be is `access.listening`'s to say."""

from __future__ import annotations

import grpc

from wicore_trt.access.listening import read_tls


def server_credentials(cert: str | None, key: str | None, client_ca: str | None) -> grpc.ServerCredentials | None:
    """TLS credentials from PEM files, or None when no file is named. With `client_ca` clients must show a certificate.

    Raises ConfigError for a missing, unreadable, malformed or mismatched file.
    """
    files = read_tls(cert, key, client_ca)
    if files is None:
        return None
    return grpc.ssl_server_credentials(
        [(files.secret, files.chain)], root_certificates=files.roots, require_client_auth=files.roots is not None
    )
