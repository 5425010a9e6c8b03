"""Keys to sign with."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from llm_prefetch.signatures import PATH, SigningKey


def make_key(number: int = 1) -> SigningKey:
    """One of 256 keys, always the same."""
    return SigningKey(_private(number))


def make_key_file(folder: Path, number: int = 1, mode: int = 0o600) -> Path:
    """The file of that key, as openssl writes it."""
    path = folder / f"key{number}.pem"
    path.write_bytes(_private(number).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(mode)
    return path


def signature_at(origin: Path) -> Path:
    """Where the signature of what is published in a folder lies."""
    return origin / PATH


def _private(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
