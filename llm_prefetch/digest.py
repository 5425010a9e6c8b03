"""Digests of bytes that lie on a disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

_PIECE_BYTES = 2**20


def hash_range(path: Path, start: int, length: int, advance: Callable[[int], None] | None = None) -> str:
    """BLAKE3 digest of at most `length` bytes of a file from byte `start`, read in small pieces.

    `advance` is told the number of bytes after each piece.

    Raises:
        OSError: the file cannot be read, or is a symbolic link.
    """
    hasher = blake3()
    buffer = memoryview(bytearray(min(_PIECE_BYTES, length)))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        at, end = start, start + length
        while at < end and (count := os.preadv(fd, [buffer[: end - at]], at)):
            hasher.update(buffer[:count])
            at += count
            if advance:
                advance(count)
    finally:
        os.close(fd)
    return hasher.hexdigest()
