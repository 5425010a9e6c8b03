"""Every error that llm-prefetch raises on purpose.

    PrefetchError                     code             exit  retryable
    |- NotReadyError                  not-ready          1
    |  `- FallbackError               fallback           1
    |- UsageError                     usage              2
    |  |- SpecError                   spec               2
    |  |- UnsupportedOriginError      unsupported        2
    |  |- MissingExtraError           missing-extra      2
    |  `- PluginError                 plugin             2
    |- OriginError                    origin             3
    |  |- OriginNotFoundError         origin-not-found   3
    |  |- OriginAccessError           origin-access      3
    |  |- OriginChangedError          origin-changed     3
    |  |- OriginUnavailableError      origin-unavailable 3     yes
    |  `- ManifestError               manifest           3
    |- ClusterError                   cluster            3
    |- DiskError                      disk               4
    |  |- NoSpaceError                no-space           4
    |  |- DiskPermissionError         disk-permission    4
    |  |- LayoutError                 layout             4
    |  `- LockTimeoutError            lock-timeout       4     yes
    `- TrustError                     trust              5
       |- UnsafePathError             unsafe-path        5
       `- DigestError                 digest             5

An error says what is wrong (`message`), where (`where`) and what to do next (`hint`). `code` is stable and
machine-readable, `exit_code` is the process status of the CLI, and `retryable` says that doing the same
again later may succeed. Instances survive pickling, because they cross Ray.
"""

from __future__ import annotations

import errno
from typing import ClassVar

from llm_prefetch.redact import redact


class PrefetchError(Exception):
    """Base of all errors raised on purpose."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        """Keep the three parts apart, so that a log, a form and a terminal can each lay them out."""
        super().__init__(message)
        self.message = message
        self.where = redact(where)  # most often a URI as its user wrote it
        self.hint = hint

    def __str__(self) -> str:
        """One line: what, where, what next."""
        where = f" ({self.where})" if self.where else ""
        hint = f": {self.hint}" if self.hint else ""
        return f"{self.message}{where}{hint}"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the keyword arguments too; `Exception` alone would lose them."""
        return (_rebuild, (type(self), self.message, self.where, self.hint))


def _rebuild(kind: type[PrefetchError], message: str, where: str, hint: str) -> PrefetchError:
    return kind(message, where=where, hint=hint)


class NotReadyError(PrefetchError):
    """A check answered with a verdict other than `HIT`."""

    code = "not-ready"
    exit_code = 1


class FallbackError(NotReadyError):
    """What a replica tried on a node that is not ready did not help."""

    code = "fallback"


class UsageError(PrefetchError):
    """The caller asked for something that makes no sense."""

    code = "usage"
    exit_code = 2


class SpecError(UsageError):
    """A SPEC, a selector or the arguments of the callback do not fit their schema."""

    code = "spec"


class UnsupportedOriginError(UsageError):
    """The scheme of a URI is unknown, or not spoken by this version."""

    code = "unsupported"


class MissingExtraError(UsageError):
    """An optional dependency is not installed."""

    code = "missing-extra"


class PluginError(UsageError):
    """A parser or a model class is not there, cannot be imported, or is not what vLLM needs it to be."""

    code = "plugin"


class OriginError(PrefetchError):
    """The origin answered with something that no retry will mend."""

    code = "origin"
    exit_code = 3


class OriginNotFoundError(OriginError):
    """The bucket, prefix or object does not exist, or the prefix is empty."""

    code = "origin-not-found"


class OriginAccessError(OriginError):
    """The origin refused the credentials."""

    code = "origin-access"


class OriginChangedError(OriginError):
    """An object is not the one that the manifest or the listing described."""

    code = "origin-changed"


class OriginUnavailableError(OriginError):
    """A time-out, a reset, a throttle or a server error."""

    code = "origin-unavailable"
    retryable = True

    def __init__(
        self, message: str, *, where: str = "", hint: str = "", retry_after: float | None = None
    ) -> None:
        """Keep, besides, for how many seconds the origin asked to be left alone."""
        super().__init__(message, where=where, hint=hint)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the seconds too."""
        return (*super().__reduce__(), {"retry_after": self.retry_after})


class ManifestError(OriginError):
    """A manifest cannot be read, or contradicts itself."""

    code = "manifest"


class ClusterError(PrefetchError):
    """Ray cannot be reached, or the selection of nodes is empty."""

    code = "cluster"
    exit_code = 3


class DiskError(PrefetchError):
    """The node store cannot be read or written."""

    code = "disk"
    exit_code = 4


class NoSpaceError(DiskError):
    """The disk is full, or would be."""

    code = "no-space"


class DiskPermissionError(DiskError):
    """The store may not be read or written by this user."""

    code = "disk-permission"


class LayoutError(DiskError):
    """The store was written by a version of llm-prefetch that this one does not know."""

    code = "layout"


class LockTimeoutError(DiskError):
    """Another process held a lock until the deadline."""

    code = "lock-timeout"
    retryable = True


class TrustError(PrefetchError):
    """Something that must not be trusted: wrong bytes, an unsafe path, an unknown signer."""

    code = "trust"
    exit_code = 5


class UnsafePathError(TrustError):
    """A path leaves its folder, collides with another or goes through a symbolic link."""

    code = "unsafe-path"


class DigestError(TrustError):
    """Bytes whose digest is not the one in the manifest."""

    code = "digest"


def disk_error(error: OSError, where: str) -> DiskError:
    """Translate an `OSError` of the node store into the error that names the mend."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(
            "no space left", where=where, hint="free space on this disk, then run the same again"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DiskPermissionError(
            f"not permitted: {error.strerror}",
            where=where,
            hint="give this user write access to the store's root",
        )
    return DiskError(
        f"the disk answered: {error.strerror or error}",
        where=where,
        hint="check the path and the disk, then run the same again",
    )
