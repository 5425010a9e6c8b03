"""What an origin states about the bytes of an object: a digest of its own, beside ours.

| origin | states | of |
|---|---|---|
| `hf://` | SHA-256 in LFS, git's SHA-1 of others | every file |
| `gs://` | CRC32C | every object |
| `abfss://`, `az://` | MD5 | what was uploaded in one piece, or by a client that sent it |
| `s3://` | SHA-256, SHA-1, CRC32C or CRC32, asked by boto3 | what a client uploaded with one, whole |
| any other, any with `transport: fsspec`, and where a URL alone opens no object (`by_url`) | nothing | |

No ETag is taken for an MD5: it is one for some objects only, and one of an object that is encrypted by a key of KMS, or
that another maker's store made up, looks just like one. To refuse right bytes would be worse.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llm_prefetch.errors import DigestError
from llm_prefetch.origins.base import ObjectInfo, Origin
from llm_prefetch.stop import Stop

_READERS = 4

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class Stated:
    """A digest of a whole object."""

    kind: str
    """`sha256`, `sha1`, `md5`, `crc32`, `crc32c`, or `git`: git's id of a file."""
    digest: str
    """In hexadecimal."""


class Hasher(Protocol):
    """Takes the bytes of an object from its front to its end."""

    def update(self, data: Buffer, /) -> object:
        """Take the next bytes."""

    def digest(self) -> bytes:
        """The digest of all that came."""

    def copy(self) -> Hasher:
        """One that goes on from here by itself."""


def find_stated(origin: Origin, item: ObjectInfo) -> Stated | None:
    """What `origin` states about `item`, if that is anything that can be computed here.

    Raises:
        OriginError: it could not be asked.
    """
    ask = getattr(origin, "stated", None)
    found: Stated | None = ask(item) if ask is not None else None
    return found if found is not None and can_hash(found.kind) else None


def foresee(origin: Origin, size: int) -> str:
    """The kind that `origin` will state about an upload of `size` bytes; empty for none."""
    ask = getattr(origin, "will_state", None)
    kind: str = ask(size) if ask is not None else ""
    return kind if can_hash(kind) else ""


def can_hash(kind: str) -> bool:
    """Whether this kind of digest can be computed here."""
    if kind == "crc32c":
        return importlib.util.find_spec("google_crc32c") is not None
    return kind in ("sha256", "sha1", "md5", "crc32", "git")


def new_hasher(kind: str, size: int) -> Hasher:
    """A hasher for an object of `size` bytes."""
    if kind == "crc32c":
        from google_crc32c import extend

        return _Crc(lambda crc, data: int(extend(crc, bytes(data))))  # it takes nothing but bytes
    if kind == "crc32":
        return _Crc(lambda crc, data: zlib.crc32(data, crc))
    if kind == "git":
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.new(kind, usedforsecurity=False)


def check(stated: Stated, hasher: Hasher, path: str, where: str) -> None:
    """Compare what is stated with the bytes that `hasher` took.

    Raises:
        DigestError: they differ.
    """
    if hasher.digest().hex() != stated.digest:
        raise DigestError(
            f"{path!r}: the origin states another {stated.kind.upper()} than its bytes have",
            where=where,
            hint="something changes bytes on the way or at the origin; upload again and compare",
        )


def check_tree(origin: Origin, items: Iterable[ObjectInfo], tree: Path, stop: Stop | None = None) -> None:
    """Compare files below `tree` with what `origin` states about them, if its listing states it: the Hub's does.

    For what is staged without a manifest. Reads the files again, from memory where they just came through it. The
    others would have to be asked about every object by itself.

    Raises:
        DigestError: one of them has other bytes.
        OriginUnavailableError: `stop` says that it is time to end.
        OSError: one of them cannot be read.
    """
    if not getattr(origin, "states_in_list", False):
        return
    with ThreadPoolExecutor(_READERS, thread_name_prefix="stated") as pool:
        for _ in pool.map(lambda item: _check_file(origin, item, tree / item.path, stop or Stop()), items):
            pass


def _check_file(origin: Origin, item: ObjectInfo, path: Path, stop: Stop) -> None:
    stated = find_stated(origin, item)
    if stated is None:
        return
    hasher, buffer = new_hasher(stated.kind, item.size), memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            stop.raise_if_set()
            hasher.update(buffer[:count])
    check(stated, hasher, item.path, origin.uri)


def from_base64(kind: str, text: str) -> Stated | None:
    """What a header says, if it says it properly."""
    try:
        digest = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return Stated(kind, digest.hex()) if digest else None


def from_s3(answer: Mapping[str, Any]) -> Stated | None:
    """What S3 says of an object; a digest of the digests of parts ("COMPOSITE", or with a count) is not the object's."""
    if answer.get("ChecksumType") == "COMPOSITE":
        return None
    for kind in ("sha256", "crc32c", "sha1", "crc32"):
        text = str(answer.get(f"Checksum{kind.upper()}", ""))
        if text and "-" not in text and can_hash(kind) and (found := from_base64(kind, text)):
            return found
    return None


class _Crc:
    def __init__(self, extend: Callable[[int, Buffer], int], value: int = 0) -> None:
        self._extend, self._value = extend, value

    def update(self, data: Buffer, /) -> None:
        self._value = self._extend(self._value, data)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")

    def copy(self) -> _Crc:
        return _Crc(self._extend, self._value)
