"""Real APIs of object stores for the tests of origins that speak them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.azure import AzureServer, azure_server
from tests.real.gcs import GCSServer, gcs_server
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


@pytest.fixture(scope="session")
def gcs_process() -> Iterator[GCSServer]:
    with gcs_server() as server:
        yield server


@pytest.fixture
def gcs(gcs_process: GCSServer, monkeypatch: pytest.MonkeyPatch) -> GCSServer:
    """What stands for Google (see `tests.real.gcs`), and an environment with a service account's key for it."""
    for name, value in gcs_process.env.items():
        monkeypatch.setenv(name, value)
    gcs_process.forget()
    return gcs_process


@pytest.fixture(scope="session")
def azure_process() -> Iterator[AzureServer]:
    with azure_server() as server:
        yield server


@pytest.fixture
def azure(azure_process: AzureServer, monkeypatch: pytest.MonkeyPatch) -> AzureServer:
    """Azurite, and an environment with the key of its account."""
    for name, value in azure_process.env.items():
        monkeypatch.setenv(name, value)
    return azure_process
