"""What an origin is: something that lists objects, opens ranges of them and, for some, takes new ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: `path` is relative to the origin's prefix, `etag` changes when the bytes do."""

    path: str
    size: int
    etag: str


class RangeBody(Protocol):
    """The bytes of one range, in order."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the front of `buffer`; 0 means the range is at its end.

        Raises:
            OriginError: the origin failed; see `retryable`.
        """


class RangeReader(Protocol):
    """Opens ranges one after the other; belongs to one thread and may keep a connection open."""

    def open_range(self, item: ObjectInfo, start: int, length: int) -> RangeBody:
        """Open `length` bytes of `item` from byte `start`. An empty etag means: any.

        Raises:
            OriginChangedError: the object's size or etag is not the one in `item`.
            OriginError: it cannot be read; see `retryable`.
        """

    def close(self) -> None:
        """Release the connection."""


class Origin(Protocol):
    """Where bytes come from. All methods may be called from any thread."""

    uri: str

    def list(self) -> Iterator[ObjectInfo]:
        """Every object below the prefix, in any order.

        Raises:
            OriginError: the bucket or folder cannot be listed.
        """

    def stat(self, path: str) -> ObjectInfo | None:
        """The object at `path`, or `None` when there is none."""

    def read(self, path: str, limit: int) -> bytes:
        """The whole of a small object of at most `limit` bytes."""

    def reader(self) -> RangeReader:
        """A new reader for one thread."""

    def write(self, path: str, body: BinaryIO, size: int) -> str:
        """Store `size` bytes as `path`; an object of that name is replaced in one step.

        Returns:
            The etag that the object has now, as `stat` gives it; empty where that is not known.
        """
