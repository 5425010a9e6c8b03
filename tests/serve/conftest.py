"""A replica's start as Ray makes it: its `CallbackBase` and its `CallbackCtx`, around a stand-in for the LLMConfig."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import struct
import subprocess
import sys
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch import ledger
from llm_prefetch.caches import this_node
from llm_prefetch.caches.install import HEADERS_VARIABLE
from llm_prefetch.serve import PrefetchCallback
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore
from tests.samples import make_published
from tests.serve.group_stand_in import nodes, stage_on, stores
from tests.serve.prefect_stand_in import server
from tests.serve.start_samples import gpu, logs, utc

# The fixtures of the modules beside this one.
__all__ = ["gpu", "logs", "nodes", "server", "stage_on", "stores", "utc"]

REPOSITORY = Path(__file__).parents[2]


@dataclass
class EngineConfig:
    """Of Ray's `VLLMEngineConfig`, the two fields that say where the weights come from."""

    hf_model_id: str | None = "meta-llama/Llama-3-8B"
    mirror_config: Any = "s3://bucket/mirror"


@dataclass
class LLMConfig:
    """Of Ray's `LLMConfig`, which imports vLLM, what the callback uses; the method gives the same each time."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    def get_engine_config(self) -> EngineConfig:
        return self.engine


UNTOUCHED = EngineConfig()


def safetensors(body: bytes = b"0123456789abcdef") -> bytes:
    """A file of weights with one tensor."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}}).encode()
    return struct.pack("<Q", len(header)) + header + body


@dataclass
class RaysDownload:
    """Stands for Ray's node initialisation, which needs a cluster and imports vLLM."""

    folder: Path
    calls: int = 0
    bring: Callable[[Path], object] | None = None
    """Puts into the folder what Ray has downloaded; a whole model, if nothing is said."""
    wait: Callable[[], Awaitable[Any]] | None = None

    async def initialize_node(self, llm_config: LLMConfig) -> None:
        self.calls += 1
        if self.wait is not None:
            await self.wait()
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text("{}")
        if self.bring is None:
            (self.folder / "model.safetensors").write_bytes(safetensors())
        else:
            self.bring(self.folder)
        llm_config.engine.hf_model_id = str(self.folder)


@pytest.fixture(autouse=True)
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RaysDownload:
    """What Ray downloads in this test, and whether it was asked to."""
    download = RaysDownload(tmp_path / "downloaded")
    name = "ray.llm._internal.serve.utils.node_initialization_utils"
    module = types.ModuleType(name)
    module.initialize_node = download.initialize_node  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return download


@pytest.fixture(autouse=True)
def no_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address of anybody's Prefect server, and no credentials for it."""
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Start:
    """One start of a replica and what it left."""

    callback: PrefetchCallback
    ray: RaysDownload

    @property
    def engine(self) -> EngineConfig:
        return self.callback.llm_config.engine

    @property
    def by_ray(self) -> bool:
        """Whether Ray has downloaded, once, and the engine gets what it brought."""
        return self.ray.calls == 1 and self.engine.hf_model_id == str(self.ray.folder)

    @property
    def untouched(self) -> bool:
        """Whether nothing was done."""
        return self.engine == UNTOUCHED and not self.ray.calls

    def run(self, then: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Call the hooks as Ray does, in the task that then starts the engine (`then`)."""

        async def start() -> None:
            await self.callback.run_callback("on_before_node_init")
            if self.callback.ctx.run_init_node:
                await self.ray.initialize_node(self.callback.llm_config)
            await self.callback.run_callback("on_after_node_init")
            if then is not None:
                await then()

        async def main() -> None:
            task = asyncio.create_task(start())
            try:
                await task
            finally:
                await asyncio.sleep(0)  # callbacks of a task run one turn of the loop after it

        asyncio.run(main())


@pytest.fixture
def make(ray: RaysDownload) -> Callable[..., Start]:
    """Make the callback as Ray does, with the arguments of the Serve YAML."""

    def make(*, raise_error_on_callback: bool = True, **kwargs: Any) -> Start:
        kwargs = {"deployment": "llama", **kwargs}
        return Start(
            PrefetchCallback(
                llm_config=LLMConfig(),
                raise_error_on_callback=raise_error_on_callback,
                ctx_kwargs={"runtime_env": {"env_vars": {}}},
                **kwargs,
            ),
            ray,
        )

    return make


@pytest.fixture
def staged(store, tmp_path):
    """A node on which `llama` is live, with one model and something beside it."""
    uri = make_published(tmp_path / "origin")
    artifacts = [
        {"name": "weights", "uri": uri},
        {"name": "extra", "uri": uri, "kind": "files"},
    ]
    stage(Spec.model_validate({"deployment": "llama", "artifacts": artifacts}), store)
    return store


@pytest.fixture
def weights(staged):
    """The folder of the model's files."""
    [folder] = [path for path in (staged.root / "artifacts" / "weights").iterdir() if path.is_dir()]
    return folder


@pytest.fixture
def rows(store) -> Callable[[str], list[dict[str, Any]]]:
    """The rows of one kind in the node's ledger."""
    return lambda kind: ledger.read(store, kind)


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """What `llama` launches with, at an origin."""
    uri = make_published(tmp_path / "origin")
    return {"deployment": "llama", "artifacts": [{"name": "weights", "uri": uri}]}


@pytest.fixture
def ready(spec: dict[str, Any], store: NodeStore) -> Callable[[], object]:
    """Make the node ready, as the staging flow does."""
    return lambda: stage(Spec.model_validate(spec), store)


@pytest.fixture
def replica(make: Callable[..., Start]) -> Callable[..., Start]:
    """A replica that asks Prefect, and then lets Ray download."""

    def replica(**kwargs: Any) -> Start:
        return make(**{"deployment": "stage/llama", "on_miss": ["prefect", "ray"], **kwargs})

    return replica


def row(rows: Callable[[str], list[dict[str, Any]]]) -> tuple[str, str, list[str]]:
    """Of the one start in the ledger: the verdict, the rung, and what came of each that was tried."""
    [start] = rows("start")
    return start["verdict"], start["rung"], [step["outcome"] for step in start["ladder"]]


def outcome(rows: Callable[[str], list[dict[str, Any]]]) -> str:
    """What the ledger says of the rung `prefect`, the first of the one start."""
    [row] = rows("start")
    rung = row["ladder"][0]
    assert rung["rung"] == "prefect"
    return str(rung["outcome"])


def refused(start: Start, match: str) -> str:
    """Expect that no engine starts, for this reason."""
    with pytest.raises(Exception, match=match) as caught:
        start.run()
    assert start.engine == UNTOUCHED
    return str(caught.value)


_STAGER = """
import json, sys, time
from pathlib import Path
from llm_prefetch.leases import staging
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore
from llm_prefetch.store import open_store
store, spec = open_store(Path(sys.argv[1])), Spec.model_validate_json(sys.argv[2])
with staging(store, spec.deployment):
    print("staging", flush=True)
    sys.stdin.readline()
    stage(spec, store)
    print("live", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def stager(store: NodeStore, spec: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A staging in another process, which goes on when it is given a line."""
    argv = [sys.executable, "-c", _STAGER, str(store.root), Spec.model_validate(spec).model_dump_json()]
    with subprocess.Popen(
        argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "staging\n"
        yield process
        process.kill()


def go_on(process: subprocess.Popen[str]) -> None:
    """Let a staging take its next step."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def during(start: Start, step: Callable[[], object]) -> None:
    """Run the start, and the step while the replica waits."""

    async def main() -> None:
        task = asyncio.ensure_future(start.callback.run_callback("on_before_node_init"))
        await asyncio.sleep(0.3)
        assert not task.done()
        step()
        await task

    asyncio.run(main())


def until(true: Callable[[], object]) -> None:
    """Wait for what another process does."""
    for _ in range(300):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come")


@pytest.fixture
def cpu_torch(tmp_path, monkeypatch):
    """Where no engine is installed: the one file of torch that says what it was built for."""
    if importlib.util.find_spec("torch") is not None:
        yield
        return
    package = tmp_path / "engine" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: str | None = None\n")
    monkeypatch.syspath_prepend(package.parent)
    for known in (this_node._folder, this_node._source):
        known.cache_clear()
    yield
    for known in (this_node._folder, this_node._source):
        known.cache_clear()


MOVED = ("VLLM_CACHE_ROOT", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE")
"""What a start with a staged compile cache sets for its engine."""


@pytest.fixture
def engine_environment(monkeypatch, cpu_torch):
    """What a start sets ends with the test."""
    for name in (*MOVED, HEADERS_VARIABLE):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
