"""The lock of a start: from the check until the engine is up or has failed, no switch of generations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llm_prefetch.errors import LockTimeoutError
from llm_prefetch.live import current_bundle, make_bundle, read_bundle, start_lock, switch
from llm_prefetch.store import acquire, release

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def other(staged):
    """Another generation to switch to: the same model alone."""
    bundle = read_bundle(staged, current_bundle(staged, "llama") or "")
    assert bundle is not None
    return make_bundle(staged, [member for member in bundle.members if member.name == "weights"])


def _is_held(store, bundle) -> bool:
    """Whether a switch has to wait; lets it happen if not."""
    try:
        return not switch(store, "llama", bundle, why="test", seconds=0)
    except LockTimeoutError:
        return True


class EngineError(Exception):
    pass


async def _comes_up():
    await asyncio.sleep(0)


async def _fails():
    raise EngineError("no GPU,\nno engine")


async def _is_cancelled():
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)


ENDS = {
    "ready": (_comes_up, contextlib.nullcontext(), "ready"),
    "failed": (_fails, pytest.raises(EngineError), "failed: EngineError: no GPU, no engine"),
    "cancelled": (_is_cancelled, pytest.raises(asyncio.CancelledError), "cancelled"),
}


@pytest.mark.parametrize(("engine", "expected", "outcome"), ENDS.values(), ids=ENDS)
def test_a_switch_waits_until_the_engine_is_up_or_has_failed(
    make, staged, other, rows, engine, expected, outcome
):
    held = []

    async def start_engine():
        held.append(_is_held(staged, other))
        await engine()

    with expected:
        make().run(start_engine)
    assert held == [True]
    assert not _is_held(staged, other)
    assert current_bundle(staged, "llama") == other.id
    assert [row["outcome"] for row in rows("engine")] == [outcome]


def test_several_replicas_may_start_at_once(make, staged, other):
    async def another():
        second = make()
        await second.callback.run_callback("on_before_node_init")
        assert not second.untouched
        assert _is_held(staged, other)

    make().run(another)
    assert not _is_held(staged, other)


@pytest.mark.parametrize("on_miss", ["ray", "fail"])
def test_a_miss_holds_nothing(make, staged, weights, other, on_miss):
    (weights / "config.json").touch()
    held = []

    async def start_engine():
        held.append(_is_held(staged, other))

    start = make(on_miss=[on_miss], raise_error_on_callback=False)
    start.run(start_engine)
    assert held == [False]
    assert start.by_ray


def test_an_error_after_the_check_lets_go_when_the_start_ends(make, staged, other):
    start = make()
    start.callback.llm_config = None  # whatever Ray may change about it
    with pytest.raises(Exception, match="Error running callback"):
        start.run()
    assert not _is_held(staged, other)


def test_while_a_switch_is_in_progress_a_start_waits_for_it(make, staged, other):
    fd = acquire(start_lock(staged, "llama"), shared=False, seconds=0, waiting_for="nobody")
    start = make()

    async def both():
        asyncio.get_running_loop().run_in_executor(None, release_soon)
        await start.callback.run_callback("on_before_node_init")

    def release_soon():
        release(fd)

    asyncio.run(both())
    assert not start.untouched


def test_a_process_that_the_engine_forked_does_not_keep_the_lock(make, staged, other):
    children = []

    async def start_engine():
        # vLLM forks its engine core, which inherits every descriptor and lives as long as the replica.
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        children.append(child)

    try:
        make().run(start_engine)
        assert not _is_held(staged, other)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


_REPLICA = """
import asyncio, sys
from tests.serve.conftest import LLMConfig
from llm_prefetch.serve import PrefetchCallback

async def start():
    callback = PrefetchCallback(LLMConfig(), deployment="llama")
    await callback.run_callback("on_before_node_init")
    print(callback.ctx.run_init_node, flush=True)
    await asyncio.sleep(1000)

asyncio.run(start())
"""


def test_the_lock_of_a_replica_that_was_killed_is_free(staged, other):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-c", _REPLICA], env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE
    ) as replica:
        assert replica.stdout is not None
        assert replica.stdout.readline() == b"False\n"
        assert _is_held(staged, other)
        replica.kill()
        replica.wait()
    assert not _is_held(staged, other)


def test_the_end_of_a_start_never_raises_into_the_event_loop(make, staged, rows):
    problems = []

    class OddError(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

    async def start_engine():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))
        raise OddError

    with pytest.raises(OddError):
        make().run(start_engine)
    assert problems == []


def test_the_reason_of_a_failed_start_is_one_short_line(make, staged, rows):
    async def start_engine():
        raise EngineError("x\n" * 10_000)

    with pytest.raises(EngineError):
        make().run(start_engine)
    [row] = rows("engine")
    assert "\n" not in row["outcome"]
    assert len(row["outcome"]) < 600
