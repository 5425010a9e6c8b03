"""A replica whose group spans several nodes starts only when all have the same bundle, and each holds what it has.

`tests/ray/test_group.py` has real nodes.
"""

from __future__ import annotations

import shutil

import pytest

from llm_prefetch import ledger
from llm_prefetch.leases import leased
from llm_prefetch.live import current_bundle
from llm_prefetch.record import Verdict
from llm_prefetch.serve.group import running
from llm_prefetch.spec import Spec
from llm_prefetch.stage import stage
from llm_prefetch.timeline import read_starts
from tests.samples import make_manifest, make_published
from tests.serve.group_stand_in import Nodes, begin, free, group


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


def test_a_node_that_lacks_it_is_named_and_no_node_holds_anything_meanwhile(stores, nodes, stage_on, caplog):
    stage_on(stores[0], stores[2])
    check, _ = begin(group(nodes, stores[0]))
    assert (check.verdict, check.reason) == (Verdict.MISSING, "10.0.0.1: nothing is live on this node")
    assert [free(store) for store in stores] == [True, True, True]
    assert [leased(store) for store in stores] == [[], [], []]
    lines = [record.getMessage() for record in caplog.records]
    assert sum("llama is HIT on this node" in line for line in lines) == 1
    assert sum("llama is MISSING on 10.0.0.1: nothing is live" in line for line in lines) == 1
    assert sum("llama is HIT on 10.0.0.2" in line for line in lines) == 1


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
