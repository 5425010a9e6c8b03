"""Digests of bytes that lie on a disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

_PIECE_BYTES = 2**20


def copy_range(path: Path, start: int, length: int, target_fd: int, target_start: int) -> str:
    """Copy `length` bytes of a file to an offset of another one; returns the digest of what was copied.

    Raises:
        OSError: a file cannot be read or written.
    """
    at = target_start

    def put(piece: memoryview) -> None:
        nonlocal at
        while piece:
            written = os.pwrite(target_fd, piece, at)
            piece, at = piece[written:], at + written

    return _read(path, start, length, put)


def hash_range(path: Path, start: int, length: int, advance: Callable[[int], None] | None = None) -> str:
    """BLAKE3 digest of at most `length` bytes of a file from byte `start`, read in small pieces.

    `advance` is told the number of bytes after each piece.

    Raises:
        OSError: the file cannot be read, or is a symbolic link.
    """
    return _read(path, start, length, lambda piece: advance(len(piece)) if advance else None)


def _read(path: Path, start: int, length: int, take: Callable[[memoryview], None]) -> str:
    """Digest of a range; `take` is given every piece of it, in a buffer that is used again."""
    hasher = blake3()
    buffer = memoryview(bytearray(min(_PIECE_BYTES, length)))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        at, end = start, start + length
        while at < end and (count := os.preadv(fd, [buffer[: end - at]], at)):
            hasher.update(buffer[:count])
            take(buffer[:count])
            at += count
    finally:
        os.close(fd)
    return hasher.hexdigest()
