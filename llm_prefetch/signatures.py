"""Signatures: a key vouches for code, so that a spec need not pin its version.

A signature lies beside the manifest, and is of the manifest's canonical bytes: these hold the digest of every chunk, so
it is of all files too. Once it is verified, the version that it is of is as good as a pin, and from there on it is one.

Keys are Ed25519. The private one stays in the process that signs: it is on no node, and cannot be pickled.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import MissingExtraError, OriginChangedError, OriginError, TrustError, UsageError
from llm_prefetch.manifest import Manifest, canonical_json
from llm_prefetch.origins import Origin, open_origin
from llm_prefetch.origins.asking import ask
from llm_prefetch.redact import redact
from llm_prefetch.resolve import Source
from llm_prefetch.spec import KEY_PATTERN, VERSION_PATTERN
from llm_prefetch.stop import Stop

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PATH = f"{manifests.FOLDER}/manifest.sig"
_FORMAT = "llm-prefetch/signature/1"
_PREFIX = b"llm-prefetch/manifest-signature/1\n"
"""Before the bytes that are signed: no signature of anything else, by the same key, is one of a manifest."""
_ALGORITHM = "ed25519:"
_SIGNATURE_PATTERN = r"^[A-Za-z0-9+/]{85}[AQgw]==$"  # 64 bytes in base64
_MAX_BYTES = 2**12
_MAX_KEY_BYTES = 2**16
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
OUTDATED = (
    "the signature that lies there is of an earlier version and counts no more: `llm-prefetch sign` renews it"
)
_HOW_TO_SIGN = "sign it with `llm-prefetch sign`, or pin its version"


@dataclass(frozen=True, slots=True)
class Signature:
    """What lies beside a manifest. Nothing of it is true before `verify` says so."""

    key: str
    """The public key, as a spec names it."""
    version: str
    """Of the manifest that was signed, to tell one that is out of date from one that is wrong."""
    signature: str
    """In base64."""

    def to_json(self) -> bytes:
        """As it is stored."""
        return canonical_json(
            {"format": _FORMAT, "key": self.key, "version": self.version, "signature": self.signature}
        )


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key."""

    _private: Ed25519PrivateKey = field(repr=False)

    @property
    def public(self) -> str:
        """The public key, for `policy.trusted_keys`."""
        return _ALGORITHM + base64.b64encode(self._private.public_key().public_bytes_raw()).decode()

    def sign(self, manifest: Manifest) -> Signature:
        """Vouch for a manifest, and so for all of its files."""
        signature = self._private.sign(_PREFIX + manifest.to_json())
        return Signature(self.public, manifest.version, base64.b64encode(signature).decode())


@dataclass(frozen=True, slots=True)
class SignedSource(Source):
    """What a key that the spec trusts has signed: its artifact is pinned to that version."""

    signed_by: str


def load_signing_key(path: Path) -> SigningKey:
    """The private key in a PEM file, as `openssl genpkey -algorithm ed25519` writes it.

    Raises:
        UsageError: there is no such key.
        TrustError: others may read it.
        MissingExtraError: the package that signs is not installed.
    """
    ed25519 = _ed25519()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(_read_private(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # a TypeError: it is encrypted
        private = None
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UsageError(
            "not an Ed25519 private key in PEM without a passphrase",
            where=str(path),
            hint=f"make one: (umask 077; openssl genpkey -algorithm ed25519 -out {path.name})",
        )
    return SigningKey(private)


def sign_published(uri: str, version: str, key: SigningKey) -> None:
    """Sign what was published at `uri`, if it is `version`.

    Raises:
        OriginChangedError: something else is there.
        OriginError: the origin refused.
    """
    stop, where = Stop(), redact(uri)
    origin = ask(lambda: open_origin(uri), stop)
    data = ask(lambda: origin.read(manifests.PATH, manifests.MAX_MANIFEST_BYTES), stop)
    manifest = manifests.parse_manifest(data, where)
    if manifest.version != version:
        raise OriginChangedError(
            f"not signed: {manifest.version} is there, not {version}",
            where=where,
            hint="if that is what you mean, sign it by its version",
        )
    body = key.sign(manifest).to_json()
    ask(lambda: origin.write(PATH, io.BytesIO(body), len(body)), stop)


def is_outdated(uri: str, version: str) -> bool:
    """Whether a signature is known to lie at `uri` that is not of `version`, and so counts no more.

    Asked after all is published: an origin that falters then has not undone it, and who stages asks again.
    """
    stop = Stop()
    try:
        found = _read_signature(ask(lambda: open_origin(uri), stop), stop)
    except TrustError:
        return True
    except OriginError:
        return False
    return found is not None and found.version != version


def require_signature(source: Source, trusted: Sequence[str], stop: Stop | None = None) -> SignedSource:
    """The source, pinned to what is about to be staged, because a key that the spec trusts has signed exactly that.

    Each node asks for itself: what another one has found, or the run has pinned, vouches for nothing.

    Raises:
        TrustError: none has.
        MissingExtraError: the package that verifies is not installed.
        OriginError: the origin cannot be read.
    """
    artifact, manifest = source.artifact, source.content
    try:
        if not isinstance(manifest, Manifest):
            raise _refused("there is no manifest that could be signed")
        if artifact.include or artifact.exclude:
            raise _refused("a signature is of all files, and its include or exclude leaves a part")
        signature = _read_signature(source.origin, stop)
        if signature is None:
            raise _refused("it is not signed")
        verify(manifest, signature, trusted)
    except TrustError as error:
        raise TrustError(
            f"{artifact.name} is code, the spec does not pin its version, and {error.message}",
            where=redact(artifact.uri),
            hint=error.hint,
        ) from error
    pinned = artifact.model_copy(update={"version": manifest.version})
    return SignedSource(pinned, source.origin, manifest, signature.key)


def verify(manifest: Manifest, signature: Signature, trusted: Sequence[str]) -> None:
    """Check that a trusted key has signed this manifest.

    Raises:
        TrustError: it has not.
        MissingExtraError: the package that verifies is not installed.
    """
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    if signature.version != manifest.version:
        raise _refused(f"its signature is of {signature.version}: what is there now was not signed")
    if signature.key not in trusted:
        raise _refused(
            f"it is signed by {signature.key}, which policy.trusted_keys does not name",
            "if you know whose key that is and trust it, add it there; else sign it yourself, or pin its version",
        )
    public = ed25519.Ed25519PublicKey.from_public_bytes(
        base64.b64decode(signature.key.removeprefix(_ALGORITHM))
    )
    try:
        public.verify(base64.b64decode(signature.signature), _PREFIX + manifest.to_json())
    except InvalidSignature as error:
        raise _refused(
            f"its signature is not by {signature.key}, as it claims",
            "somebody has changed it: find out who, then publish and sign it again",
        ) from error


def _read_signature(origin: Origin, stop: Stop | None) -> Signature | None:
    """What lies beside the manifest; `None` where nothing does."""
    there = ask(lambda: origin.stat(PATH), stop)
    if there is None:
        return None
    found = None
    if there.size <= _MAX_BYTES:
        found = _parse(ask(lambda: origin.read(PATH, _MAX_BYTES), stop))
    if found is None:
        raise _refused("its signature cannot be read")
    return found


def _parse(data: bytes) -> Signature | None:
    """Only what `to_json` writes: each signature has one form, byte for byte."""
    try:
        body = json.loads(data)
        found = Signature(body["key"], body["version"], body["signature"])
        forms = (
            (KEY_PATTERN, found.key),
            (VERSION_PATTERN, found.version),
            (_SIGNATURE_PATTERN, found.signature),
        )
        return found if found.to_json() == data and all(re.fullmatch(*form) for form in forms) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _refused(reason: str, hint: str = _HOW_TO_SIGN) -> TrustError:
    return TrustError(reason, hint=hint)


def _read_private(path: Path) -> bytes:
    """As ssh does: what belongs to this user must be for this user alone."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise UsageError(
            f"cannot read the key: {error.strerror}", where=str(path), hint="name the file of a private key"
        ) from error
    if found.st_uid == os.getuid() and found.st_mode & _OTHERS:
        raise TrustError(
            f"others may use this private key: its mode is {stat.S_IMODE(found.st_mode):04o}",
            where=str(path),
            hint=f"chmod 600 {path}; make a new one if somebody could have read it",
        )
    return data


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingExtraError(
            "signatures need the package cryptography",
            where="this Python",
            hint="pip install 'llm-prefetch[sign]'",
        ) from error
    return ed25519
