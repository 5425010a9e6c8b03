"""How fast a transfer may go and how patient it is: the bandwidth cap, and the retries with their budget."""

from __future__ import annotations

import random
import threading
import time

from llm_prefetch import settings
from llm_prefetch.errors import DigestError, OriginUnavailableError, PrefetchError

_BACKOFF_SECONDS = 0.2
_LONGEST_BACKOFF_SECONDS = 20.0
_LONGEST_RETRY_AFTER_SECONDS = 60.0


class Throttle:
    """Lets at most so many bytes per second pass, over all workers; the limit may change at any time."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        """`None` means no limit."""
        self._own = self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def share(self, bytes_per_second: float) -> None:
        """This node's part of what several nodes may use together; the limit of its own holds too."""
        with self._lock:
            self._rate = min(bytes_per_second, self._own or bytes_per_second)

    def delay(self, count: int) -> float:
        """Let `count` bytes pass; the seconds to wait before."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
        return begin - now


class Retries:
    """The retries of one transfer: so many for each range, and a budget for all of them together.

    An outage costs each range a few tries; the budget ends what an origin makes of many ranges that fail now and
    then, each within its own tries.
    """

    def __init__(self, chunks: int, workers: int) -> None:
        """Allow for `workers` ranges that use up their tries, and for one retry in four of all `chunks`."""
        self._attempts = settings.ATTEMPTS.get()
        self._budget = self._attempts * workers + chunks // 4
        self._not_before = 0.0
        self._lock = threading.Lock()
        self.count = 0
        """Retries so far."""

    def delay(self) -> float:
        """Seconds to wait before any range is asked for, because the origin said so by `Retry-After`."""
        return max(0.0, self._not_before - time.monotonic())

    def again(self, error: PrefetchError, attempt: int) -> float:
        """Seconds to wait before the next try after `error` in try number `attempt`, which counts from 1.

        Raises:
            PrefetchError: `error` itself, when another try makes no sense; or that the budget is used up.
        """
        # A digest may differ because a bit flipped on the way; an origin that lies does so again.
        worth_it = error.retryable or (isinstance(error, DigestError) and attempt == 1)
        if not worth_it or attempt >= self._attempts:
            raise error
        asked = min(getattr(error, "retry_after", None) or 0.0, _LONGEST_RETRY_AFTER_SECONDS)
        with self._lock:
            self.count += 1
            self._not_before = max(self._not_before, time.monotonic() + asked)
            if self.count > self._budget:
                raise OriginUnavailableError(
                    f"the origin fails too often: {self.count - 1} retries, then {error.message}",
                    where=error.where,
                    hint="what is done is kept; stage again when the origin is well",
                ) from error
        longest = min(_LONGEST_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2**attempt)
        return random.uniform(longest / 2, longest)  # noqa: S311 (jitter, not a secret)
