"""A replica whose group spans several nodes starts only when all have the same bundle, and repairs only those that lack it.

The nodes are stores in this process, each asked as Ray's actors are; `tests/ray/test_group.py` has real ones.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_prefetch import ledger
from llm_prefetch.errors import ClusterError, FallbackError, LockTimeoutError
from llm_prefetch.leases import leased
from llm_prefetch.live import DeploymentCheck, check_deployment, current_bundle, start_lock
from llm_prefetch.record import Verdict
from llm_prefetch.serve.group import Group, running
from llm_prefetch.serve.group_node import Download, NodeActor
from llm_prefetch.serve.ladder import Ladder, Note, Rung
from llm_prefetch.serve.options import CallbackOptions
from llm_prefetch.serve.start import Start
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.store import NodeStore, locked, open_store
from llm_prefetch.timeline import read_starts
from tests.samples import FILES, make_folder, make_manifest, make_published
from tests.serve.conftest import safetensors, until

OTHER = {**FILES, "config.json": b'{"a": 9}'}


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger="ray.serve.llm_prefetch")
    return caplog


class Handle:
    """As Ray's handle of an actor: what goes there and what comes back is pickled."""

    def __init__(self, actor: NodeActor) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Any:
        async def answer(arguments: bytes) -> Any:
            return pickle.loads(pickle.dumps(await getattr(self.actor, method)(*pickle.loads(arguments))))

        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(answer(pickle.dumps(given))))


class Nodes:
    """A placement group: the own node is called `own`, the others `node-1`, `node-2`, ..."""

    own = "own"

    def __init__(self, stores: Sequence[NodeStore]) -> None:
        self.stores = {f"node-{number}" if number else "own": store for number, store in enumerate(stores)}
        self.asked = 0
        self.joined: list[str] = []
        self.given: list[CallbackOptions] = []
        self.handle: Callable[[NodeActor], Any] = Handle

    def nodes(self) -> Mapping[str, str]:
        self.asked += 1
        return {key: "" if key == "own" else f"10.0.0.{key[-1]}" for key in self.stores}

    def join(self, node: str, options: CallbackOptions, replica: str, start: str) -> Any:
        self.joined.append(node)
        self.given.append(pickle.loads(pickle.dumps(options)))
        # On a real node the same path leads to another disk.
        return self.handle(
            NodeActor(options.model_copy(update={"root": self.stores[node].root}), replica, start)
        )


@pytest.fixture
def stores(tmp_path: Path) -> list[NodeStore]:
    return [open_store(tmp_path / f"disk-{number}", create=True) for number in range(3)]


@pytest.fixture
def nodes(stores: list[NodeStore]) -> Nodes:
    return Nodes(stores)


@pytest.fixture
def stage_on(spec: dict[str, Any]) -> Callable[..., None]:
    """Make `llama` live on these stores."""

    def stage_on(*stores: NodeStore, spec: dict[str, Any] = spec) -> None:
        for store in stores:
            stage(Spec.model_validate(spec), store)

    return stage_on


@pytest.fixture
def other(tmp_path: Path) -> dict[str, Any]:
    """A later version of what `llama` launches with."""
    uri = make_published(tmp_path / "other", OTHER)
    return {"deployment": "llama", "artifacts": [{"name": "weights", "uri": uri}]}


def group(nodes: Nodes | None, store: NodeStore, *, seconds: float = 60.0, **options: Any) -> Group:
    deadlines = {"check": seconds, **options.pop("deadlines", {})}
    given = CallbackOptions.model_validate(
        {"deployment": "llama", "root": store.root, "deadlines": deadlines, **options}
    )
    return Group(Start(given, "replica-7"), nodes)


def begin(
    group: Group,
    *rungs: str,
    then: Callable[[], Awaitable[object]] | None = None,
    seconds: float = 30.0,
) -> tuple[DeploymentCheck, list[str]]:
    """A start: the check, the rungs, the rows in the ledgers, and the engine; the last check, and what rungs said."""

    async def start() -> tuple[DeploymentCheck, list[str]]:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(group.end)
        first = check = await group.check()
        ladder, rung = Ladder("llama", 60.0), "hit" if check.ready else "fail"
        if not check.ready:
            climb = [Rung(name, seconds, partial(group.run, name)) for name in rungs]
            check = await ladder.climb(climb, group.check, check)
            rung = ladder.attempts[-1].rung if check.ready else "fail"
        group.record(first, check.bundle, rung, ladder.attempts)
        if then is not None:
            await then()
        return check, [attempt.outcome for attempt in ladder.attempts]

    async def main() -> tuple[DeploymentCheck, list[str]]:
        task = asyncio.create_task(start())
        try:
            return await task
        finally:
            for _ in range(20):  # what the other nodes were told
                await asyncio.sleep(0)

    return asyncio.run(main())


def free(store: NodeStore) -> bool:
    """Whether a switch may happen on a node now."""
    try:
        with locked(start_lock(store, "llama"), seconds=0, waiting_for="a start"):
            return True
    except LockTimeoutError:
        return False


def stagings(store: NodeStore) -> int:
    """How many there were on a node."""
    return len(ledger.read(store, "stage"))


def test_when_all_nodes_are_ready_each_holds_its_generation_until_the_replica_ends(stores, nodes, stage_on):
    stage_on(*stores)
    held: list[bool] = []

    async def engine() -> None:
        held.extend(free(store) for store in stores)

    one = group(nodes, stores[0])
    check, said = begin(one, then=engine)
    assert (check.verdict, said) == (Verdict.HIT, [])
    assert held == [False, False, False]
    assert [free(store) for store in stores] == [True, True, True]
    for store in stores:
        [lease] = leased(store)
        assert (lease.bundle, lease.replica) == (current_bundle(store, "llama"), "replica-7")
    assert running(one.start.id) is one


def test_each_other_node_tells_where_its_own_start_spent_its_time(stores, nodes, stage_on):
    stage_on(*stores)
    begin(group(nodes, stores[0]))
    for store in stores[1:]:
        [start], [engine] = ledger.read(store, "start"), ledger.read(store, "engine")
        assert (start["role"], engine["role"]) == ("worker", "worker")
        named = [phase["phase"] for phase in engine["phases"]]
        assert named[-2:] == ["verify", "engine"]
        assert [one.name for one in read_starts([start, engine])[0].phases] == named


def test_an_engine_that_fails_holds_nothing_on_any_node(stores, nodes, stage_on):
    stage_on(*stores)

    async def engine() -> None:
        raise RuntimeError("no GPU")

    one = group(nodes, stores[0])
    with pytest.raises(RuntimeError):
        begin(one, then=engine)
    assert [free(store) for store in stores] == [True, True, True]
    assert [leased(store) for store in stores] == [[], [], []]
    assert [ledger.read(store, "engine")[0]["outcome"] for store in stores] == [
        "failed: RuntimeError: no GPU"
    ] * 3
    assert running(one.start.id) is None


def test_a_node_that_lacks_it_is_named_and_no_node_holds_anything_meanwhile(stores, nodes, stage_on, log):
    stage_on(stores[0], stores[2])
    check, _ = begin(group(nodes, stores[0]))
    assert (check.verdict, check.reason) == (Verdict.MISSING, "10.0.0.1: nothing is live on this node")
    assert [free(store) for store in stores] == [True, True, True]
    assert [leased(store) for store in stores] == [[], [], []]
    lines = [record.getMessage() for record in log.records]
    assert sum("llama is HIT on this node" in line for line in lines) == 1
    assert sum("llama is MISSING on 10.0.0.1: nothing is live" in line for line in lines) == 1
    assert sum("llama is HIT on 10.0.0.2" in line for line in lines) == 1


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


def test_a_parser_that_is_missing_on_one_node_is_no_hit(stores, nodes, tmp_path):
    parser = {"my_parser.py": b"class MyParser: ...\n", "empty": b""}
    uri = make_published(tmp_path / "parser", parser)
    version = make_manifest(parser).version
    artifacts = [
        {"name": "weights", "uri": make_published(tmp_path / "origin")},
        {"name": "parser", "uri": uri, "kind": "plugin", "version": version},
    ]
    for store in stores:
        stage(Spec.model_validate({"deployment": "llama", "artifacts": artifacts}), store)
    folder = stores[1].artifact("parser", version)
    folder.chmod(0o755)
    (folder / "my_parser.py").unlink()
    check, _ = begin(group(nodes, stores[0]))
    assert check.verdict is Verdict.PARTIAL
    assert check.reason.startswith("10.0.0.1: parser: 'my_parser.py' cannot be found")
    [row] = ledger.read(stores[0], "start")
    assert [node["artifacts"] for node in row["nodes"]] == [
        {"weights": "HIT", "parser": "HIT"},
        {"weights": "HIT", "parser": "PARTIAL"},
        {"weights": "HIT", "parser": "HIT"},
    ]


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


def test_a_node_that_does_not_answer_is_missing_and_nothing_waits_for_ever(stores, nodes, stage_on):
    stage_on(*stores)

    class Silent(Handle):
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_given: asyncio.ensure_future(asyncio.sleep(1000)))

    nodes.handle = lambda actor: Silent(actor) if len(nodes.joined) == 1 else Handle(actor)
    check, _ = begin(group(nodes, stores[0], seconds=0.2))
    assert (check.verdict, check.reason) == (Verdict.MISSING, "10.0.0.1: no answer in 0.2 s")


class Dead(Handle):
    """An actor that has died: Ray raises where its answer is awaited."""

    def __getattr__(self, method: str) -> Any:
        async def answer() -> None:
            raise OSError("the actor\nhas died")

        return SimpleNamespace(remote=lambda *_given: asyncio.ensure_future(answer()))


def unplaceable(actor: NodeActor) -> Handle:
    """Ray may say at once that no actor is to be had."""
    raise OSError("the actor\nhas died")


@pytest.mark.parametrize("first", [Dead, unplaceable])
def test_a_node_that_could_not_be_asked_is_asked_again_after_a_rung(stores, nodes, stage_on, first):
    stage_on(*stores)

    def handle(actor: NodeActor) -> Handle:
        return first(actor) if len(nodes.joined) == 1 else Handle(actor)

    nodes.handle = handle
    check, [said] = begin(group(nodes, stores[0]), "wait")
    assert check.ready
    assert nodes.joined == ["node-1", "node-2", "node-1"]
    assert said.startswith("failed: 10.0.0.1: there is no actor of ours")
    [row] = ledger.read(stores[0], "start")
    assert row["reason"] == "10.0.0.1: it cannot be asked: OSError: the actor has died"


def test_a_node_that_is_lost_in_the_middle_of_a_rung_does_not_hide_what_became_of_the_others(
    stores, nodes, spec
):
    class Lost(Handle):
        def __getattr__(self, method: str) -> Any:
            if method == "run":
                raise OSError("connection reset")
            return super().__getattr__(method)

    nodes.handle = lambda actor: Lost(actor) if len(nodes.joined) == 1 else Handle(actor)
    check, [said] = begin(group(nodes, stores[0], spec=spec, on_miss=["stage", "fail"]), "stage")
    assert check.reason == "10.0.0.1: nothing is live on this node"
    assert said.startswith("failed: this node: staged")
    assert "10.0.0.1: it cannot be asked: OSError: connection reset" in said
    assert check_deployment(stores[2], "llama").ready


def test_a_group_that_ray_puts_elsewhere_is_checked_there(stores, nodes, stage_on):
    stage_on(stores[0], stores[2])
    lost = nodes.stores.pop("node-2")
    one = group(nodes, stores[0])

    async def moves(note: Note) -> str:
        del nodes.stores["node-1"]
        nodes.stores["node-3"] = lost
        return "moved"

    async def main() -> DeploymentCheck:
        missed = await one.check()
        assert missed.reason.startswith("10.0.0.1")
        return await Ladder("llama", 60.0).climb([Rung("wait", 30.0, moves)], one.check, missed)

    assert asyncio.run(main()).ready
    assert list(one.others) == ["node-3"]


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


def test_the_other_nodes_get_the_path_of_this_one_and_none_of_its_secrets(stores, nodes, monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_ROOT", str(stores[0].root))
    begin(group(nodes, stores[0], root=None, prefect={"api_key": "hush", "auth_string": "me:hush"}))
    assert [given.root for given in nodes.given] == [stores[0].root] * 2
    assert "hush" not in "".join(
        str(value.get_secret_value()) for given in nodes.given for value in (given.prefect.api_key,) if value
    )
    assert [given.prefect.auth_string for given in nodes.given] == [None, None]

    shutil.rmtree(stores[0].root)
    nodes.given.clear()
    begin(group(nodes, stores[0], root=None))
    assert [given.root for given in nodes.given] == [stores[0].root] * 2


def test_a_replica_that_is_alone_asks_ray_once_and_makes_no_actor(stores, stage_on):
    stage_on(stores[0])
    alone = Nodes(stores[:1])
    one = group(alone, stores[0])
    check, _ = begin(one)
    assert check.ready
    assert (alone.asked, alone.joined) == (1, [])
    assert "nodes" not in ledger.read(stores[0], "start")[0]
    assert running(one.start.id) is None
    assert begin(group(None, stores[0]))[0].ready


def test_a_group_that_is_not_placed_yet_is_waited_for(stores, nodes, stage_on):
    stage_on(*stores)
    placed: Callable[[], Mapping[str, str]] = nodes.nodes

    def later() -> Mapping[str, str]:
        answer = placed()
        if nodes.asked < 3:
            raise ClusterError("the placement group is PENDING", hint="wait")
        return answer

    nodes.nodes = later
    assert begin(group(nodes, stores[0]))[0].ready
    assert nodes.asked == 3


@pytest.mark.parametrize("error", [ClusterError("the placement group is PENDING"), RuntimeError("no GCS")])
def test_where_the_nodes_are_not_known_none_is_ready(stores, nodes, stage_on, error):
    stage_on(*stores)

    def never() -> Mapping[str, str]:
        raise error

    nodes.nodes = never
    check, _ = begin(group(nodes, stores[0], seconds=0.7))
    assert check.verdict is Verdict.MISSING
    assert check.reason.startswith("the nodes of the placement group are not known: ")
    assert str(error) in check.reason
    assert (free(stores[0]), leased(stores[0])) == (True, [])
