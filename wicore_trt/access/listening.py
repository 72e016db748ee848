"""Address and TLS files of a server, checked before a library sees them.

Libraries report a used port or a bad certificate late, unclearly or not at all. It must not know services. Invariant:
checked addresses can be bound and checked files can shake hands, short of a race for the port.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from wicore_trt.config import ServerSettings
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.files import UntrustedFiles

CURVES = ("secp256r1", "secp384r1", "secp521r1")
KINDS = "Use a PEM certificate with a key of RSA, ECDSA on P-256, P-384 or P-521, or Ed25519."


def _read_pem(name: str, path: str) -> bytes:
    """Read a file without text before its first block, say a byte order mark: OpenSSL skips it, gRPC does not."""
    try:
        raw = UntrustedFiles(error=ConfigError).read_bytes(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return raw[max(raw.find(b"-----BEGIN"), 0) :]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Contents of PEM files that fit each other, and their context. With `roots` clients must show a certificate."""

    chain: bytes
    secret: bytes
    roots: bytes | None
    context: ssl.SSLContext


def _check_kind(path: str, chain: bytes) -> None:
    """Raise ConfigError for a certificate with a kind of key that OpenSSL knows and gRPC's TLS does not."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509.oid import PublicKeyAlgorithmOID

    try:
        certificate = x509.load_pem_x509_certificate(chain)
        kind, key = certificate.public_key_algorithm_oid, certificate.public_key()
        known = kind in (PublicKeyAlgorithmOID.RSAES_PKCS1_v1_5, PublicKeyAlgorithmOID.ED25519)
        known |= isinstance(key, EllipticCurvePublicKey) and key.curve.name in CURVES
    except (ValueError, UnsupportedAlgorithm):
        known = False
    if not known:
        raise ConfigError(f"{path}: gRPC does not know this kind of certificate.", fix=KINDS)


def read_tls(settings: ServerSettings) -> TlsFiles | None:
    """Read the TLS files; None when none is named. Raises ConfigError for unreadable, malformed or mismatched files."""
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None or key is None:  # the settings have both or none
        return None
    chain, secret = _read_pem("tls_cert", cert), _read_pem("tls_key", key)
    roots = _read_pem("tls_client_ca", client_ca) if client_ca is not None else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{cert} and {key} are not a PEM certificate and its unencrypted key ({error}).") from None
    _check_kind(cert, chain)
    if roots is not None:
        try:
            context.load_verify_locations(cafile=client_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"tls_client_ca: {client_ca} holds no PEM certificates ({error}).") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return TlsFiles(chain, secret, roots, context)


def find_http_host(settings: ServerSettings) -> str:
    if settings.http_host is not None:
        return settings.http_host
    return f"{settings.host}.http" if settings.host.startswith("unix:") else settings.host


def is_local(host: str) -> bool:
    """Tell whether only this machine reaches an address. Names except localhost count as reachable by others."""
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(settings: ServerSettings) -> None:
    """Raise ConfigError when other machines reach the server and it has no keys, or no TLS to hide them."""
    doors = [(find_http_host(settings), settings.http_port), (settings.admin_host, settings.admin_port)]
    hosts = [settings.host, *(host for host, port in doors if port is not None)]
    reached = [host for host in hosts if not is_local(host)]
    if not reached or settings.insecure:
        return
    instead = "or --insecure where something in front of it does that"
    if settings.api_key is None and settings.keys_file is None and settings.tls_client_ca is None:
        fix = f"Set WICORE_SERVER__API_KEY or --keys-file, and --tls-cert and --tls-key; {instead}."
        raise ConfigError(f"Everybody who reaches {reached[0]} could use this server: it has no API keys.", fix=fix)
    if settings.tls_cert is None:
        fix = f"Give --tls-cert and --tls-key, {instead}."
        raise ConfigError(f"API keys and texts would travel to {reached[0]} in clear text: there is no TLS.", fix=fix)


def check_server(settings: ServerSettings) -> None:
    """Raise ConfigError for bad TLS files and an open door, EnvironmentUnfitError for addresses that cannot be used."""
    check_exposure(settings)
    read_tls(settings)
    apart = settings.port == 0 or settings.host.startswith("unix:") or find_http_host(settings) != settings.host
    if settings.port == settings.http_port and not apart:
        problem = f"server.port and server.http_port are both {settings.port}; gRPC and HTTP need one each."
        raise ConfigError(problem, fix="Give another --grpc-port or --http-port.")
    check_free(settings.host, settings.port)
    if settings.http_port is not None:
        check_free(find_http_host(settings), settings.http_port, "--http-port")
    if settings.admin_port is not None:
        check_free(settings.admin_host, settings.admin_port, "--admin-port")


def format_address(host: str, port: int) -> str:
    """Format a host and port; `unix:/path` hosts are addresses already."""
    if host.startswith("unix:"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int, flag: str = "--grpc-port") -> None:
    """Raise EnvironmentUnfitError when the address is in use, unknown or forbidden. `flag` chooses the port."""
    if host.startswith("unix:"):
        _check_socket_path(Path(host.removeprefix("unix:")))
        return
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        fix = "Give an address of this machine."
        raise EnvironmentUnfitError(f"Host {host!r} is unknown ({error}).", fix=fix) from None
    failures = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                fix = f"Stop the other process or choose another {flag}."
                raise EnvironmentUnfitError(f"Port {port} on {host} is in use.", fix=fix) from None
            failures.append(error)
    if len(failures) == len(found):
        raise EnvironmentUnfitError(f"Cannot listen on {format_address(host, port)}: {failures[0].strerror}.")


def _check_socket_path(path: Path) -> None:
    """Raise EnvironmentUnfitError if a server answers at the socket: gRPC and we silently replace socket files."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise EnvironmentUnfitError(f"Cannot create the socket {path}: {path.parent} is no writable directory.")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise EnvironmentUnfitError(f"{path} exists and is no socket.", fix="Choose another path or remove it.")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return  # left behind by a process that ended
    raise EnvironmentUnfitError(f"The socket {path} is in use.", fix="Stop the other process or choose another path.")
