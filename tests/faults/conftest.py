"""A bucket behind a proxy that misbehaves, what is in it, and what must hold of the node store in the end."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_prefetch import manifest as manifests
from llm_prefetch.live import check_deployment, current_bundle
from llm_prefetch.record import Verdict, records
from llm_prefetch.spec import Artifact, Spec
from llm_prefetch.stage import StageReport, stage
from llm_prefetch.store import NodeStore
from llm_prefetch.verify import full_check
from tests.faults.doors import BUCKET, DOORS, Door
from tests.real.azure import AzureServer, azure_server
from tests.real.fault_proxy import FaultProxy
from tests.real.gcs import GCSServer, gcs_server
from tests.real.hub import Hub, running_hub
from tests.real.s3 import S3Server, s3_server
from tests.samples import make_manifest, make_spec, tree

CHUNK = 64 * 2**10
RANDOM = random.Random(3)
FILES: Mapping[str, bytes] = {
    "config.json": RANDOM.randbytes(700),
    "empty": b"",
    "model 1+ü%.safetensors": RANDOM.randbytes(5 * CHUNK + 123),
    "sub/model-2.safetensors": RANDOM.randbytes(4 * CHUNK),
}
WEIGHTS = "model-2"
"""Is in the path of one file."""
_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with s3_server() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def gcs_process() -> Iterator[GCSServer]:
    with gcs_server() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def azure_process() -> Iterator[AzureServer]:
    with azure_server() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def hub_process() -> Iterator[Hub]:
    from huggingface_hub import close_session

    with running_hub() as running:
        yield running
        close_session()


@dataclass
class Sick:
    """Files at an origin behind a proxy, and a node that stages them."""

    proxy: FaultProxy
    door: Door
    server: Any
    store: NodeStore
    prefix: str
    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    """What the prefix holds."""

    @property
    def published(self) -> bool:
        """Whether a manifest is there."""
        return self.door.published

    @property
    def weights(self) -> str:
        """What is in the path of the requests for one file; behind a signed address it is not told which."""
        return "/blob" if self.door.scheme == "hf" else WEIGHTS

    @property
    def uri(self) -> str:
        return self.door.uri(self.proxy, self.prefix)

    @property
    def artifact(self) -> Artifact:
        [artifact] = self.spec.artifacts
        return artifact

    @property
    def spec(self) -> Spec:
        return make_spec(self.uri, transport=self.door.transport)

    def write_spec(self, folder: Path) -> Path:
        """The same, in a file."""
        path = folder / "spec.yaml"
        artifacts = [{"name": "weights", "uri": self.uri, "transport": self.door.transport}]
        path.write_text(yaml.safe_dump({"deployment": "llama", "artifacts": artifacts}))
        return path

    def put(self, path: str, data: bytes) -> None:
        """Write an object behind everybody's back."""
        self.files[path] = data
        self.door.put(self.server, self.prefix, path, self.files)

    def delete(self, path: str) -> None:
        """Delete one the same way."""
        self.server.delete(BUCKET, f"{self.prefix}/{path}")
        del self.files[path]

    def publish(self) -> None:
        """Put the manifest beside what is there."""
        body = make_manifest(self.files, CHUNK).to_json()
        self.door.put(self.server, self.prefix, manifests.PATH, {manifests.PATH: body})

    def stage(self, **options: Any) -> StageReport:
        return stage(self.spec, self.store, **options)

    def asked(self, path: str) -> list[float]:
        """When ranges of a file were asked for."""
        return [request.at for request in self.proxy.requests if request.range and path in request.path]

    # --- what must hold ---

    def assert_right(self) -> None:
        """What is at the origin is live, to the byte."""
        check = check_deployment(self.store, "llama", full=True)
        assert check.verdict is Verdict.HIT, check.reason
        assert tree(self.store.engine_path("llama", "weights").resolve()) == self.files

    def assert_nothing_committed(self) -> None:
        """Not a byte counts, and nothing is live."""
        assert list(records(self.store)) == []
        assert current_bundle(self.store, "llama") is None

    def assert_nothing_wrong(self, *allowed: Mapping[str, bytes]) -> None:
        """What passes a full check is what the origin held at one moment."""
        for record in records(self.store):
            if full_check(self.store, record.name, record.version).ready:
                assert tree(self.store.artifact(record.name, record.version)) in [self.files, *allowed]

    def assert_heals(self) -> None:
        """Without the fault, staging again succeeds."""
        self.proxy.mend()
        os.environ["LLM_PREFETCH_STALL_SECONDS"] = (
            "10"  # a test of a stall may have less; `settings` puts it back
        )
        self.stage()
        self.assert_right()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Few tries, so that a fault that stays is soon told."""
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", "3")
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", "4")
    monkeypatch.setenv("LLM_PREFETCH_STALL_SECONDS", "10")
    return monkeypatch


@pytest.fixture
def quick(settings: pytest.MonkeyPatch) -> None:
    """Little patience, for tests in which nothing comes."""
    settings.setenv("LLM_PREFETCH_STALL_SECONDS", "0.5")


@pytest.fixture
def no_worker_left() -> Iterator[None]:
    """After the test no thread of a transfer is left."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("transfer"):
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture(params=["s3", "s3-listed"])
def origin(request, store: NodeStore, settings, no_worker_left) -> Iterator[Sick]:
    """The files with a manifest, and without."""
    with _sick(request.param, request, store, settings) as sick:
        yield sick


@pytest.fixture(params=["s3", "s3-listed", "web"])
def anywhere(request, store: NodeStore, settings, no_worker_left) -> Iterator[Sick]:
    """The same, and the web."""
    with _sick(request.param, request, store, settings) as sick:
        yield sick


@pytest.fixture(params=[name for name in DOORS if name not in ("s3", "s3-listed")])
def elsewhere(request, store: NodeStore, settings, no_worker_left) -> Iterator[Sick]:
    """Everywhere but where `origin` is."""
    with _sick(request.param, request, store, settings) as sick:
        yield sick


@pytest.fixture
def published(request, store: NodeStore, settings, no_worker_left) -> Iterator[Sick]:
    with _sick("s3", request, store, settings) as sick:
        yield sick


@pytest.fixture
def listed(request, store: NodeStore, settings, no_worker_left) -> Iterator[Sick]:
    with _sick("s3-listed", request, store, settings) as sick:
        yield sick


@pytest.fixture
def web_behind_proxy(request, store: NodeStore, settings, no_worker_left) -> Iterator[Sick]:
    with _sick("web", request, store, settings) as sick:
        yield sick


@contextlib.contextmanager
def _sick(
    name: str, request: pytest.FixtureRequest, store: NodeStore, settings: pytest.MonkeyPatch
) -> Iterator[Sick]:
    door = DOORS[name]
    server = request.getfixturevalue(door.fixture)
    with door.behind_proxy(server) as proxy:
        for variable, value in door.env(server, proxy).items():
            settings.setenv(variable, value)
        sick = Sick(proxy, door, server, store, f"{name}-{next(_numbers)}")
        for path, data in FILES.items():
            sick.put(path, data)
        if sick.published:
            sick.publish()
        yield sick
    if door.transport == "fsspec":
        with warnings.catch_warnings():  # aiohttp warns of each answer that nobody read to its end
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
