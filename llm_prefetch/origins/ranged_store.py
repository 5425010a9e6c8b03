"""Ranges that obstore reads itself: for credentials that cannot sign a URL (bearer tokens).

Each piece is copied once more than by the lean reader, and memory is obstore's: a megabyte or so for each range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from llm_prefetch.errors import OriginChangedError, OriginNotFoundError, OriginUnavailableError
from llm_prefetch.origins.base import ObjectInfo

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import AzureStore, GCSStore, S3Store

_PIECE_BYTES = 2**20


class StoreReader:
    """Reads ranges of objects of a store."""

    def __init__(
        self, store: S3Store | GCSStore | AzureStore, where: str, explain: Callable[[Exception], Exception]
    ) -> None:
        """Errors name `where`; `explain` turns one of obstore's into one of ours."""
        self._store = store
        self._where = where
        self._explain = explain

    def open_range(self, item: ObjectInfo, start: int, length: int) -> StoreBody:
        """Ask for the range and check that the answer is that range of that object."""
        import obstore
        from obstore.exceptions import PreconditionError

        options: GetOptions = {"range": (start, start + length)}
        if item.etag:
            options["if_match"] = item.etag
        try:
            answer = obstore.get(self._store, item.path, options=options)
        except FileNotFoundError as error:
            raise OriginNotFoundError(
                f"{item.path!r} is not there", where=self._where, hint="publish the folder again"
            ) from error
        except PreconditionError as error:
            raise self._changed(item, "changed at the origin since it was listed") from error
        except Exception as error:
            if "416 " in str(error):
                raise self._changed(item, f"is shorter than {item.size} bytes at the origin") from error
            raise self._explain(error) from error
        if answer.meta["size"] != item.size:
            raise self._changed(
                item, f"has {answer.meta['size']} bytes at the origin where {item.size} were expected"
            )
        if tuple(answer.range) != (start, start + length):
            raise self.lost(item.path, "the answer is not the range asked for")
        pieces = (
            _at_once(answer) if length <= _PIECE_BYTES else iter(answer.stream(min_chunk_size=_PIECE_BYTES))
        )
        return StoreBody(self, pieces, length, item.path)

    def close(self) -> None:
        """Connections are obstore's own."""

    def explain(self, error: Exception) -> Exception:
        """One of our errors for one of obstore's."""
        return self._explain(error)

    def lost(self, path: str, reason: str) -> OriginUnavailableError:
        """An answer that cannot be used, where the next one may be."""
        return OriginUnavailableError(f"{path!r}: {reason}", where=self._where, hint="stage again")

    def _changed(self, item: ObjectInfo, what: str) -> OriginChangedError:
        return OriginChangedError(
            f"{item.path!r} {what}", where=self._where, hint="publish the folder again, then stage"
        )


def _at_once(answer: GetResult) -> Iterator[Any]:
    """One call for all of it: a stream costs one more."""
    yield answer.bytes()


class StoreBody:
    """The body of one range."""

    def __init__(self, reader: StoreReader, pieces: Iterator[Any], length: int, path: str) -> None:
        """Read `length` bytes from `pieces`."""
        self._reader, self._pieces, self._left, self._path = reader, pieces, length, path
        self._piece = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        """Copy the next bytes; an answer that ends early is an error, not an end."""
        if not self._left:
            return 0
        while not self._piece:
            try:
                self._piece = memoryview(next(self._pieces))
            except StopIteration:
                raise self._reader.lost(self._path, f"the answer ended {self._left} bytes early") from None
            except Exception as error:
                raise self._reader.explain(error) from error
        count = min(len(buffer), len(self._piece), self._left)
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        self._left -= count
        return count
