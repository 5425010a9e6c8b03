"""Where a group is not ready, a rung makes it so on the nodes that lack it alone, and all get the same bundle."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llm_prefetch import ledger
from llm_prefetch.errors import FallbackError
from llm_prefetch.leases import leased
from llm_prefetch.live import check_deployment, current_bundle, start_lock
from llm_prefetch.record import Verdict
from llm_prefetch.serve.group_node import Download
from llm_prefetch.serve.ladder import Ladder, Note, Rung
from llm_prefetch.store import NodeStore, locked
from tests.samples import FILES, make_folder, make_published
from tests.serve.conftest import safetensors, until
from tests.serve.group_stand_in import Handle, begin, group

OTHER = {**FILES, "config.json": b'{"a": 9}'}


@pytest.fixture
def other(tmp_path: Path) -> dict[str, Any]:
    """A later version of what `llama` launches with."""
    uri = make_published(tmp_path / "other", OTHER)
    return {"deployment": "llama", "artifacts": [{"name": "weights", "uri": uri}]}


def stagings(store: NodeStore) -> int:
    """How many there were on a node."""
    return len(ledger.read(store, "stage"))


@pytest.mark.parametrize("lacking", [(0,), (1,), (1, 2), (0, 1, 2)])
def test_only_the_nodes_that_lack_it_stage(stores, nodes, stage_on, spec, lacking):
    stage_on(*[store for number, store in enumerate(stores) if number not in lacking])
    check, [said] = begin(group(nodes, stores[0], spec=spec, on_miss=["stage", "fail"]), "stage")
    assert check.ready
    for number, store in enumerate(stores):
        name = f"10.0.0.{number}" if number else "this node"
        assert (f"{name}: staged" in said) == (number in lacking)
        assert number in lacking or stagings(store) == 1  # that of before
        assert check_deployment(store, "llama", full=True).ready
        assert [lease.bundle for lease in leased(store)] == [check.bundle]


def test_different_versions_are_no_hit_and_the_spec_makes_them_one(stores, nodes, stage_on, spec, other):
    stage_on(*stores[:2])
    stage_on(stores[2], spec=other)
    old, new = (current_bundle(store, "llama") for store in stores[1:])
    check, _ = begin(group(nodes, stores[0]))
    assert check.verdict is Verdict.STALE
    for name, bundle in (("this node", old), ("10.0.0.1", old), ("10.0.0.2", new)):
        assert f"{name} has {str(bundle)[:14]}" in check.reason
    assert [leased(store) for store in stores] == [[], [], []]

    check, _ = begin(group(nodes, stores[0], spec=spec, on_miss=["stage", "fail"]), "stage")
    assert (check.ready, check.bundle) == (True, old)
    assert [current_bundle(store, "llama") for store in stores] == [old, old, old]
    assert [[lease.bundle for lease in leased(store)] for store in stores] == [[old], [old], [old]]


def test_nodes_that_were_ready_follow_those_that_got_a_later_version(stores, nodes, stage_on, other):
    stage_on(*stores[:2])
    one = group(nodes, stores[0], spec=other, on_miss=["stage", "fail"])
    check, [said] = begin(one, "stage")
    assert check.ready
    assert len({current_bundle(store, "llama") for store in stores}) == 1
    assert check_deployment(stores[0], "llama").bundle == check.bundle
    assert said.count("staged") == 3
    [row] = ledger.read(stores[0], "start")
    assert [(node["verdict"], node["rung"]) for node in row["nodes"]] == [
        ("HIT", "stage"), ("HIT", "stage"), ("MISSING", "stage")
    ]  # fmt: skip


def test_each_ledger_tells_of_its_node_and_the_replicas_of_all(stores, nodes, stage_on, spec):
    stage_on(stores[0], stores[2])
    check, _ = begin(group(nodes, stores[0], spec=spec, on_miss=["stage", "fail"]), "stage")
    [row] = ledger.read(stores[0], "start")
    assert (row["verdict"], row["rung"]) == ("MISSING", "stage")
    told = [(node["address"], node["verdict"], node["bundle"], node["rung"]) for node in row["nodes"]]
    assert told == [
        ("this node", "HIT", check.bundle, "hit"),
        ("10.0.0.1", "MISSING", check.bundle, "stage"),
        ("10.0.0.2", "HIT", check.bundle, "hit"),
    ]
    rows = [ledger.read(store, "start", "engine") for store in stores]
    assert {one["start"] for of_node in rows for one in of_node} == {row["start"]}
    for (begun, ended), (_, verdict, bundle, rung) in zip(rows[1:], told[1:], strict=True):
        assert (begun["role"], begun["verdict"], begun["bundle"], begun["rung"]) == (
            "worker", verdict, bundle, rung
        )  # fmt: skip
        assert (ended["role"], ended["outcome"]) == ("worker", "ready")


def test_while_a_rung_works_its_line_tells_of_every_node(stores, nodes, spec):
    one = group(nodes, stores[0], spec=spec, on_miss=["stage", "fail"])
    note, lines = Note(), []

    async def main() -> None:
        await one.check()
        work = asyncio.ensure_future(one.run("stage", note))
        while not work.done():
            await asyncio.sleep(0.2)
            lines.append(note.describe())
        await work

    with locked(stores[2].lock("nobody"), seconds=0, waiting_for="nobody"):
        asyncio.run(main())
    assert any("this node: staging on this node" in line and "10.0.0.2: " in line for line in lines)


def test_a_rung_that_is_given_up_is_broken_off_on_all_nodes(stores, nodes, spec):
    """A staging waits for the start lock that somebody holds on each other node, far longer than the rung may take."""
    asked = []

    class Watched(Handle):
        def __getattr__(self, method: str) -> Any:
            asked.append(method)
            return super().__getattr__(method)

    nodes.handle = Watched
    one = group(nodes, stores[0], spec=spec, on_miss=["stage", "fail"])

    async def main() -> list[str]:
        missed = await one.check()
        ladder = Ladder("llama", 60.0)
        with (
            locked(start_lock(stores[1], "llama"), seconds=0, waiting_for="nobody"),
            locked(start_lock(stores[2], "llama"), seconds=0, waiting_for="nobody"),
        ):
            await ladder.attempt(Rung("stage", 3.0, partial(one.run, "stage")))
        assert not missed.ready
        return [attempt.outcome for attempt in ladder.attempts]

    [said] = asyncio.run(main())
    assert said.startswith("gave up after 3 s")
    assert asked.count("abandon") == 2
    assert [current_bundle(store, "llama") for store in stores[1:]] == [None, None]


def test_a_rung_for_all_nodes_ends_when_the_last_is_ready_and_not_before(stores, nodes, stage_on):
    one = group(nodes, stores[0])
    seen = []

    async def main() -> None:
        await one.check()
        async with one.watching("prefect") as ready:
            for store in stores:
                seen.append(ready())
                stage_on(store)
                await asyncio.sleep(1.0)
            await asyncio.to_thread(until, ready)
            seen.append(ready())

    asyncio.run(main())
    assert seen == [False, False, False, True]


def test_what_ray_downloaded_is_judged_on_the_other_nodes_too(stores, nodes, tmp_path):
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors())
    one = group(nodes, stores[0])
    whole = Download(str(folder), "s3://bucket/x", "MODEL_AND_TOKENIZER", None)

    async def main(download: Download) -> str:
        await one.check()
        return await one.accept(download, Note())

    assert asyncio.run(main(whole)) == "; so it is on 2 other nodes"
    (folder / "model.safetensors").unlink()
    with pytest.raises(FallbackError, match=r"10\.0\.0\.1: .* it holds no weights.*; 10\.0\.0\.2: "):
        asyncio.run(main(whole))
    streamed = Download(str(folder), "s3://bucket/x", "EXCLUDE_SAFETENSORS", "runai_streamer")
    assert asyncio.run(main(streamed))


def test_what_ray_downloaded_is_committed_on_each_node_that_it_came_to(tmp_path, stores, nodes):
    model = {"config.json": b"{}", "model.safetensors": safetensors()}
    folder = make_folder(tmp_path / "downloaded", model)
    uri = make_published(tmp_path / "origin", model)
    spec = {"deployment": "llama", "artifacts": [{"name": "weights", "uri": uri}]}
    one = group(nodes, stores[0], spec=spec)

    async def main() -> str:
        await one.check()
        return await one.accept(Download(str(folder), "s3://bucket/x", "MODEL_AND_TOKENIZER", None), Note())

    assert asyncio.run(main()) == "; so it is on 2 other nodes"
    until(lambda: all(check_deployment(store, "llama").ready for store in stores[1:]))
    assert not check_deployment(stores[0], "llama").ready  # that one is the replica's own affair
