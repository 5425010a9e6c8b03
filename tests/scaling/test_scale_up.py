"""The order of a scale-up, what it leaves behind when it fails, and when it counts as done; the cluster is a fake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from llm_prefetch.caches.evidence import Outcome
from llm_prefetch.cluster.inspection import LiveBundle
from llm_prefetch.cluster.reports import Node
from llm_prefetch.errors import ClusterError, NotReadyError, OriginNotFoundError, PrefetchError
from llm_prefetch.record import Verdict
from llm_prefetch.scaling.autoscaler import Request
from llm_prefetch.scaling.scale_report import ScaleReport, StartSeen, require_scaled
from llm_prefetch.scaling.serve_api import Replica, Served, UnansweredError
from llm_prefetch.scaling.serve_target import ServeTarget
from tests.scaling.stand_in import GPU, NODES, PROOF, SPEC, World, live, replica, target


@pytest.fixture
def world() -> World:
    return World()


def raised(report: ScaleReport) -> PrefetchError:
    with pytest.raises(PrefetchError) as error:
        require_scaled(report)
    assert not report.scaled
    return error.value


def test_nodes_then_files_then_serve_and_the_request_stands_until_the_replicas_run(world: World) -> None:
    report = world.run()
    require_scaled(report)
    assert world.told == [
        "request", "stage", "verify", "scale 2", "ledgers id1", "clear",
    ]  # fmt: skip
    assert world.requests[-1] == Request()
    assert list(report.steps) == ["nodes", "stage", "verify", "scale", "replicas"]
    assert (report.before, report.wanted, report.asked) == (1, 2, 2)
    old, new = report.rows()
    assert (old["replica"], old["new"], old["reason"]) == ("old", False, "")
    assert new == {
        "replica": "new", "node": "10.0.0.1", "state": "RUNNING", "new": True, "staged": True,
        "start": "HIT", "reason": "",
    }  # fmt: skip
    assert "1 to 2 replicas" in report.markdown()
    assert "Done: 1 new" in report.markdown()


def test_repeating_it_asks_nobody_for_anything(world: World) -> None:
    world.run()
    world.events.clear()
    report = world.run()
    require_scaled(report)
    assert world.told == ["stage", "verify"]
    assert report.asked == 0
    assert report.serve == "Serve is as it was"


def test_no_replica_is_ever_taken_away(world: World) -> None:
    world.served = Served(3, tuple(replica(f"r{n}") for n in range(3)), (GPU,))
    report = world.run(target(replicas=2))
    require_scaled(report)
    assert report.wanted == 3
    assert not [event for event in world.events if event.startswith("scale")]


def test_add_is_on_top_of_what_serve_is_asked_for_when_the_run_begins(world: World) -> None:
    # Somebody else asks for one more while files are staged: then there are enough.
    def meanwhile() -> None:
        world._happens("stage")
        world.scale(2)

    world.stage = meanwhile  # type: ignore[method-assign]
    report = world.run(target(replicas=0, add=1))
    require_scaled(report)
    assert (report.wanted, report.asked) == (2, 0)
    assert world.told.count("scale 2") == 1


def test_the_run_waits_for_a_node_and_says_so(world: World, caplog: Any) -> None:
    caplog.set_level("INFO")
    world.free = {"id0": 0.0}
    world.at[12] = lambda: world.free.update(id1=1.0)
    report = world.run()
    require_scaled(report)
    assert report.steps["nodes"] == 12
    # What is there is held, and one more is asked for.
    labels = {"pool": "a10g"}
    assert world.requests[0] == Request(({"GPU": 1.0}, GPU), (labels, labels))
    lines = [
        line for line in caplog.messages if line.startswith("waiting for room for 1 more of {'GPU': 1.0}")
    ]
    assert [line.partition("; ")[2] for line in lines] == [
        f"{seconds} of at most 900 s" for seconds in (0, 5, 10)
    ]


def test_without_an_autoscaler_the_wait_ends_and_says_what_to_do(world: World) -> None:
    world.free = {"id0": 0.0}
    error = raised(world.run(target(node_seconds=30)))
    assert isinstance(error, ClusterError)
    assert "no room for 1 more of {'GPU': 1.0} on the selected nodes within 30 s" in str(error)
    assert "Serve is as it was" in str(error)
    assert "autoscaler" in error.hint
    assert world.told == ["request", "clear"]
    assert world.now == 30


def test_nodes_are_only_waited_for_where_none_shall_be_requested(world: World) -> None:
    world.free = {"id0": 0.0}
    world.at[3] = lambda: world.free.update(id1=1.0)
    require_scaled(world.run(target(request_nodes=False)))
    assert world.requests == []


def test_the_shape_that_was_given_counts_and_replicas_without_a_node_need_a_place_too(world: World) -> None:
    pending = Replica("pending", "actor-pending", "STARTING", "", "")
    world.served = Served(2, (replica("old"), pending), ())
    world.free = {"id0": 0.0}
    raised(world.run(target(replicas=3, shape={"GPU": 0.5}, node_seconds=0)))
    assert world.requests[0].shapes == ({"GPU": 1.0}, {"GPU": 0.5}, {"GPU": 0.5})


BEFORE_SERVE = ["read", "request", "stage", "verify", "proofs"]


@pytest.mark.parametrize("step", BEFORE_SERVE)
def test_a_failure_before_serve_is_asked_leaves_it_untouched_and_no_request(world: World, step: str) -> None:
    world.trouble[step] = OriginNotFoundError("no such bucket", where="s3://b", hint="make it")
    error = raised(world.run(target(require_proof=True)))
    assert isinstance(error, OriginNotFoundError)
    assert str(error) == "no such bucket; Serve is as it was (s3://b): make it"
    assert "scale 2" not in world.events
    assert world.events[-1] == ("clear" if step != "read" else "read")


@pytest.mark.parametrize("step", [*BEFORE_SERVE, "scale 2", "ledgers id1"])
def test_an_interruption_at_any_point_clears_the_request(world: World, step: str, caplog: Any) -> None:
    world.trouble[step] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.run(target(require_proof=True))
    assert world.events[-1] == ("clear" if step != "read" else "read")
    asked = step in {"scale 2", "ledgers id1"}
    after = "was asked for 2 replicas, and is left so" if asked else "is as it was"
    assert f"interrupted: Serve {after}" in caplog.text


def test_nodes_that_are_not_ready_after_the_staging_keep_serve_as_it_is(world: World) -> None:
    world.lives[NODES[1]] = LiveBundle("", Verdict.MISSING, "nothing is live on this node", ())
    error = raised(world.run())
    assert isinstance(error, NotReadyError)
    assert "1 of 2 nodes are ready" in str(error)
    assert "10.0.0.1: nothing is live on this node" in str(error)
    assert "scale 2" not in world.events

    some = SPEC.model_copy(update={"policy": SPEC.policy.model_copy(update={"min_ready": "1"})})
    world.new_replicas = (replica("new", NODES[0]),)
    require_scaled(world.run(spec=some))


def test_nodes_with_different_generations_keep_serve_as_it_is(world: World) -> None:
    world.lives[NODES[1]] = live("bundle-2", "b3-2")
    assert "2 of 2 nodes are ready, with 2 generations" in str(raised(world.run()))
    assert "scale 2" not in world.events


def test_a_compile_cache_that_fits_only_some_of_the_nodes_is_no_other_generation(world: World) -> None:
    world.lives[NODES[1]] = live("bundle-with-cache", "b3-1", "b3-9")
    world.seen = {"actor-new": StartSeen("HIT", "hit", "bundle-with-cache", "")}
    require_scaled(world.run())
    assert world.served.target == 2

    world = World()
    world.lives[NODES[1]] = live("bundle-with-cache", "b3-1", "b3-9")
    world.seen = {"actor-new": StartSeen("HIT", "hit", "bundle-1", "")}  # what the other node has
    assert "from another generation than the one that was verified on 10.0.0.1" in str(raised(world.run()))


def test_a_compile_cache_that_was_not_proven_keeps_serve_as_it_is_where_a_proof_is_wanted(
    world: World,
) -> None:
    del world.proven[NODES[1]]
    error = raised(world.run(target(require_proof=True)))
    assert "none was tried; Serve is as it was (10.0.0.1)" in str(error)
    assert "flow prove" in error.hint
    world.proven[NODES[1]] = replace(PROOF, used=False, outcome=Outcome.MISS, reason="another GPU")
    assert "miss: another GPU" in str(raised(world.run(target(require_proof=True))))
    assert "scale 2" not in world.events
    require_scaled(world.run())


def test_a_refusal_of_serve_says_that_it_is_as_it_was_and_silence_that_it_may_not_be(world: World) -> None:
    world.trouble["scale 2"] = ClusterError("412", hint="wait")
    assert "412; Serve is as it was: wait" in str(raised(world.run()))
    world.trouble["scale 2"] = UnansweredError("no answer", hint="wait")
    assert "Serve was asked for 2 replicas, and is left so" in str(raised(world.run()))


def test_replicas_that_do_not_come_up_leave_serve_as_asked(world: World) -> None:
    world.new_replicas = (replica("new", NODES[1], "STARTING"),)
    error = raised(world.run(target(replica_seconds=60)))
    assert "after 60 s there is still to wait for 1 more replicas to run" in str(error)
    assert "Serve was asked for 2 replicas, and is left so" in str(error)
    assert world.events[-1] == "clear"


def test_what_serve_has_given_up_is_not_waited_for(world: World) -> None:
    world.new_replicas = ()
    world.at[2] = lambda: setattr(world, "served", replace(world.served, failure="out of memory"))
    assert "Serve has given up: out of memory" in str(raised(world.run()))
    assert world.now == 2
    world.events.clear()
    assert "Serve is as it was" in str(raised(world.run()))
    assert world.told == []


def test_serve_may_take_a_moment_to_take_up_the_number_and_the_dashboard_may_be_away(world: World) -> None:
    before = world.served

    def slowly(replicas: int) -> None:
        World.scale(world, replicas)
        asked, world.served = world.served, before
        world.at[world.now + 2] = lambda: setattr(world, "served", asked)
        world.at[world.now + 3] = lambda: world.trouble.update(read=UnansweredError("restarting", hint="-"))
        world.at[world.now + 5] = world.trouble.clear

    world.scale = slowly  # type: ignore[method-assign]
    world.new_replicas = (replica("new", NODES[1], "STARTING"),)
    running = (replica("old"), replica("new", NODES[1]))
    world.at[9] = lambda: setattr(world, "served", replace(world.served, replicas=running))
    report = world.run()
    require_scaled(report)
    assert report.steps["replicas"] == 9


def test_another_scaler_that_lowers_the_number_is_told(world: World) -> None:
    world.new_replicas = ()
    world.at[3] = lambda: setattr(world, "served", replace(world.served, target=1))
    assert "somebody has asked Serve for 1 replicas meanwhile, 2 were wanted" in str(raised(world.run()))


@pytest.mark.parametrize(
    ("seen", "trouble"),
    [
        ({}, "the ledger of 10.0.0.1 knows of no start of new"),
        (
            {"actor-new": StartSeen("MISSING", "ray", "", "")},
            "new found MISSING on 10.0.0.1 and came up by ray",
        ),
        ({"actor-new": StartSeen("HIT", "hit", "bundle-0", "")}, "from another generation"),
    ],
)
def test_a_new_replica_that_is_not_warm_fails_the_run_though_all_run(
    world: World, seen: dict[str, StartSeen], trouble: str
) -> None:
    world.seen = seen
    report = world.run()
    error = raised(report)
    assert isinstance(error, NotReadyError)
    assert trouble in str(error)
    assert "Serve was asked for 2 replicas" in str(error)
    assert next(row["reason"] for row in report.rows() if row["new"]) in str(error)
    assert "Not done" in report.markdown()

    calm = World()
    calm.seen = seen
    require_scaled(calm.run(target(require_hit=False)))


def test_a_new_replica_where_nothing_was_staged_fails_the_run(world: World) -> None:
    stray = Node("id9", "10.0.0.9", "host9")
    world.new_replicas = (replica("new", stray),)
    report = world.run(target(require_hit=False))
    assert "new came up on 10.0.0.9, where nothing was staged" in str(raised(report))


def test_replicas_that_serve_replaced_are_told(world: World) -> None:
    def rolled(replicas: int) -> None:
        World.scale(world, replicas)
        world.served = replace(world.served, replicas=(replica("new", NODES[1]), replica("newer", NODES[1])))

    world.scale = rolled  # type: ignore[method-assign]
    report = world.run(target(require_hit=False))
    assert report.replaced == ("old",)
    assert "Serve has replaced replicas that ran before: old" in str(raised(report))


@pytest.mark.parametrize("numbers", [{"replicas": 0}, {"replicas": 2, "add": 1}, {"replicas": -1}])
def test_exactly_one_number_is_given(numbers: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"exactly one|greater than or equal to 0"):
        target(**numbers)


def test_every_field_of_the_form_says_what_it_is_and_none_is_a_union() -> None:
    fields = ServeTarget.model_json_schema()["properties"]
    assert all(field["description"] for field in fields.values())
    assert not [name for name, field in fields.items() if "anyOf" in field or "oneOf" in field]
