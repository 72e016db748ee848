"""Certificates that OpenSSL takes: those that gRPC does not are refused before a server listens or reads them again."""

from __future__ import annotations

import datetime
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

from wicore_trt.access.listening import read_tls
from wicore_trt.config import ServerSettings
from wicore_trt.errors import ConfigError

MADE = {
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "p521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "ed448": ed448.Ed448PrivateKey.generate,
}
UNKNOWN = ("secp256k1", "ed448")


def files(folder: Path, kind: str, before: bytes = b"") -> ServerSettings:
    """Settings with a certificate and key, with something in front of both."""
    key = MADE[kind]()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 7, now, now + datetime.timedelta(days=1))
    signed = made.sign(key, None if kind.startswith("ed") else hashes.SHA256())
    pem = serialization.Encoding.PEM
    cert, secret = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(before + signed.public_bytes(pem))
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    secret.write_bytes(before + plain)
    return ServerSettings(tls_cert=str(cert), tls_key=str(secret))


async def taken(chain: bytes, secret: bytes) -> bool:
    """Whether a server of gRPC listens with them."""
    server = grpc.aio.server()
    try:
        return server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(secret, chain)])) > 0
    except RuntimeError:
        return False


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind not in UNKNOWN])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"Certificate:\n    Data:\n"])
async def test_what_is_taken_is_what_grpc_takes(tmp_path: Path, kind: str, before: bytes) -> None:
    found = read_tls(files(tmp_path, kind, before))
    assert found is not None
    assert await taken(found.chain, found.secret)


@pytest.mark.parametrize("kind", UNKNOWN)
async def test_what_grpc_does_not_take_is_refused_with_what_to_do(tmp_path: Path, kind: str) -> None:
    settings = files(tmp_path, kind)
    assert not await taken(Path(settings.tls_cert).read_bytes(), Path(settings.tls_key).read_bytes())
    with pytest.raises(ConfigError, match=r"cert\.pem.*P-256"):
        read_tls(settings)
