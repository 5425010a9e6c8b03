"""A real S3 API for the tests of origins that speak it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.s3 import S3Server, s3_server


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with an environment that leads to it and its count of requests at nothing."""
    for name, value in s3_process.env.items():
        monkeypatch.setenv(name, value)
    s3_process.forget()
    return s3_process
