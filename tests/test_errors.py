"""Every error says what, where and what next, has its exit code, and survives the way through Ray."""

from __future__ import annotations

import ast
import copy
import errno
import inspect
import os
import pickle
from pathlib import Path

import pytest

from llm_prefetch import errors
from llm_prefetch.errors import (
    DiskError,
    DiskPermissionError,
    NoSpaceError,
    OriginUnavailableError,
    PrefetchError,
    disk_error,
)

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PrefetchError)]
RETRYABLE = {"OriginUnavailableError", "LockTimeoutError"}
PACKAGE = Path(errors.__file__).parent


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling_whole(kind):
    again = pickle.loads(pickle.dumps(kind("what", where="where", hint="hint")))
    assert type(again) is kind
    assert str(again) == "what (where): hint"
    assert (again.message, again.where, again.hint) == ("what", "where", "hint")


@pytest.mark.parametrize("seconds", [None, 0.0, 7.5])
def test_what_an_origin_asks_for_survives_pickling_too(seconds):
    error = OriginUnavailableError("what", where="where", hint="hint", retry_after=seconds)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert again.retry_after == seconds
        assert str(again) == "what (where): hint"
    assert OriginUnavailableError("what").retry_after is None


@pytest.mark.parametrize("kind", KINDS)
def test_where_is_shown_without_the_secrets_of_a_uri(kind):
    error = kind("what", where="https://me:s3cret@host/x?sig=s3cret", hint="hint")
    assert error.where == "https://host/x"
    assert b"s3cret" not in pickle.dumps(error)


def test_codes_are_unique_and_only_passing_troubles_are_retryable():
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    assert {kind.__name__ for kind in KINDS if kind.retryable} == RETRYABLE


def test_the_table_at_the_top_is_true():
    for kind in KINDS:
        [line] = [
            line for line in errors.__doc__.splitlines() if line.lstrip(" |`-").split(" ")[0] == kind.__name__
        ]
        told = line.lstrip(" |`-").split()[1:]
        if kind is not PrefetchError:
            assert told == [kind.code, str(kind.exit_code), *(["yes"] if kind.retryable else [])]


def test_where_and_hint_may_be_missing():
    assert str(PrefetchError("what")) == "what"
    assert str(PrefetchError("what", hint="hint")) == "what: hint"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EACCES, DiskPermissionError),
        (errno.EPERM, DiskPermissionError),
        (errno.EROFS, DiskPermissionError),
        (errno.EIO, DiskError),
        (errno.EMFILE, DiskError),
    ],
)
def test_a_refusal_of_the_disk_becomes_the_error_that_names_the_mend(number, kind):
    error = disk_error(OSError(number, os.strerror(number)), "/store")
    assert type(error) is kind
    assert error.exit_code == 4
    assert "/store" in str(error)


def _raised_without_hint():
    names = {kind.__name__ for kind in KINDS}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                given = {keyword.arg for keyword in node.keywords}
                if "hint" not in given:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_every_error_that_the_library_makes_says_what_to_do_next():
    allowed = {"errors.py"}
    assert [place for place in _raised_without_hint() if place.partition(":")[0] not in allowed] == []
