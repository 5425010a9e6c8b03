"""A replica's start as Ray makes it: its `CallbackBase` and its `CallbackCtx`, around a stand-in for the LLMConfig."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from llm_prefetch import ledger
from llm_prefetch.serve import PrefetchCallback
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from tests.samples import make_published


@dataclass
class EngineConfig:
    """Of Ray's `VLLMEngineConfig`, the two fields that say where the weights come from."""

    hf_model_id: str | None = "meta-llama/Llama-3-8B"
    mirror_config: Any = "s3://bucket/mirror"


@dataclass
class LLMConfig:
    """Of Ray's `LLMConfig`, which imports vLLM, the one method that the callback uses; it gives the same each time."""

    engine: EngineConfig = field(default_factory=EngineConfig)

    def get_engine_config(self) -> EngineConfig:
        return self.engine


UNTOUCHED = EngineConfig()


@dataclass
class Start:
    """One start of a replica and what it left."""

    callback: PrefetchCallback

    @property
    def engine(self) -> EngineConfig:
        return self.callback.llm_config.engine

    @property
    def untouched(self) -> bool:
        """Whether Ray goes on as if we were not there."""
        return self.engine == UNTOUCHED and self.callback.ctx.run_init_node

    def run(self, then: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Call the hook as Ray does, in the task that then starts the engine (`then`)."""

        async def start() -> None:
            await self.callback.run_callback("on_before_node_init")
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
def make() -> Callable[..., Start]:
    """Make the callback as Ray does, with the arguments of the Serve YAML."""

    def make(*, raise_error_on_callback: bool = True, **kwargs: Any) -> Start:
        kwargs = {"deployment": "llama", **kwargs}
        return Start(
            PrefetchCallback(
                llm_config=LLMConfig(),
                raise_error_on_callback=raise_error_on_callback,
                ctx_kwargs={"runtime_env": {"env_vars": {}}},
                **kwargs,
            )
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
