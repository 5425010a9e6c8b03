"""Safe names and safe relative paths: the one place that decides what may be created below a folder.

Manifests, listings and specs come from outside. Whatever they name is checked here before it touches a disk,
and files are opened component by component without following symbolic links, so that neither `../` nor a
link that someone placed in the way can lead out of the store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator

from llm_prefetch.errors import UnsafePathError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_NAME = re.compile(NAME_PATTERN)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MAX_COMPONENT_BYTES = 255
_MAX_PATH_BYTES = 1024


def is_safe_name(name: str) -> bool:
    """Whether `name` may be one component of a path in the store."""
    return _NAME.fullmatch(name) is not None and not name.endswith("\n")


def check_relative_path(path: str, where: str) -> str:
    """Return `path` if it is a safe, normal, relative POSIX path.

    Raises:
        UnsafePathError: the path is empty, absolute, not normal, leaves its folder or cannot be a file name.
    """
    reason = _why_unsafe(path)
    if reason:
        raise UnsafePathError(
            f"unsafe path {path!r}: it {reason}",
            where=where,
            hint="publish the folder again under plain names",
        )
    return path


def check_paths(paths: Iterable[str], where: str) -> None:
    """Check every path, and that no two of them need the same place.

    Raises:
        UnsafePathError: a path is unsafe, occurs twice, or is a file where another needs a folder.
    """
    files: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        check_relative_path(path, where)
        if path in files:
            raise UnsafePathError(f"path {path!r} occurs twice", where=where, hint="publish the folder again")
        files.add(path)
        folders.update(parents(path))
    for path in files & folders:
        raise UnsafePathError(
            f"path {path!r} is both a file and a folder", where=where, hint="rename one of them at the origin"
        )


def parents(path: str) -> Iterator[str]:
    """The folders above a relative path, innermost first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def open_beneath(root_fd: int, path: str, flags: int) -> int:
    """Open `path` below the folder `root_fd` without following any symbolic link; folders are made as needed.

    Returns:
        A file descriptor that the caller closes.

    Raises:
        UnsafePathError: a component is a symbolic link or not what the path needs it to be.
        OSError: the disk refused.
    """
    parent, _, name = path.rpartition("/")
    folder_fd = open_folder_beneath(root_fd, parent) if parent else root_fd
    try:
        # Not blocking, or a pipe in the way would hold us for ever.
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644, dir_fd=folder_fd)
    except OSError as error:
        raise _as_unsafe(error, path) from error
    finally:
        if folder_fd != root_fd:
            os.close(folder_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _in_the_way(path)
    return fd


def open_folder_beneath(root_fd: int, parent: str) -> int:
    """Walk down to `parent`, one component at a time, creating what is missing; the caller closes the result.

    Raises:
        UnsafePathError: a component is a symbolic link or a file.
        OSError: the disk refused.
    """
    folder_fd = os.dup(root_fd)
    for component in parent.split("/") if parent else ():
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(component, 0o755, dir_fd=folder_fd)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(component, flags, dir_fd=folder_fd)
        except OSError as error:
            raise _as_unsafe(error, parent) from error
        finally:
            os.close(folder_fd)
        folder_fd = below
    return folder_fd


def open_own_beneath(root_fd: int, path: str) -> int:
    """Open `path` as `open_beneath` does, to write to it, and make sure that it is nobody else's.

    A file that another version shares is given up for a new one, and a read-only file is made writable.

    Raises:
        UnsafePathError: something is in the way.
        OSError: the disk refused.
    """
    with contextlib.suppress(FileExistsError):
        return open_beneath(root_fd, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    fd = open_beneath(root_fd, path, os.O_RDONLY | os.O_CREAT)
    try:
        shared = os.fstat(fd).st_nlink > 1
        if not shared:
            os.fchmod(fd, 0o644)
    finally:
        os.close(fd)
    if shared:
        unlink_beneath(root_fd, path)
    return open_beneath(root_fd, path, os.O_WRONLY | os.O_CREAT)


def unlink_beneath(root_fd: int, path: str) -> None:
    """Remove the name `path`, if it is there."""
    parent, _, name = path.rpartition("/")
    folder_fd = open_folder_beneath(root_fd, parent)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)


def _why_unsafe(path: str) -> str:
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "contains a backslash"
    if _CONTROL.search(path):
        return "contains a control character"
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid Unicode"
    components = path.split("/")
    if any(component in ("", ".", "..") for component in components):
        return "has an empty, '.' or '..' component"
    if len(encoded) > _MAX_PATH_BYTES or any(len(c.encode()) > _MAX_COMPONENT_BYTES for c in components):
        return "is too long"
    return ""


def _as_unsafe(error: OSError, path: str) -> Exception:
    """`O_NOFOLLOW` answers ELOOP for a link to a file and ENOTDIR for a link (or a file) in place of a folder."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EMLINK, errno.ENXIO):
        return _in_the_way(path)
    return error


def _in_the_way(path: str) -> UnsafePathError:
    return UnsafePathError(
        f"something else is in the way of {path!r}",
        where="a symbolic link or a file in the store's partial/ folder",
        hint="remove that partial folder and stage again",
    )
