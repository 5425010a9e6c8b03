"""Real APIs of object stores for the tests of origins that speak them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.origins.places import Place, make_place
from tests.real.azure import AzureServer, azure_server
from tests.real.gcs import GCSServer, gcs_server
from tests.real.hub import TOKEN, Hub, running_hub
from tests.real.s3 import S3Server, s3_server
from tests.real.web import Web, web_server


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


@pytest.fixture(scope="session")
def hub_process() -> Iterator[Hub]:
    from huggingface_hub import close_session

    with running_hub() as running:
        yield running
        close_session()


@pytest.fixture
def hub(hub_process: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty Hub, and an environment that leads to it with a token that it knows."""
    hub_process.repos.clear()
    hub_process.forget()
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub_process.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub_process


@pytest.fixture
def web() -> Iterator[Web]:
    """A web server that serves nothing yet."""
    with web_server() as running:
        yield running


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An empty prefix of its own; which one is said by `places.at`."""
    return make_place(request.param, request, tmp_path, monkeypatch)
