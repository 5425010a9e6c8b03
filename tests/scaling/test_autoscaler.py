"""Which room there is, what the autoscaler is asked for, and that nothing is left standing."""

from __future__ import annotations

from typing import Any

import pytest

from llm_prefetch.scaling.autoscaler import NodeRoom, Request, request_for, standing, without_room
from llm_prefetch.spec import NodeSelector

GPU = {"GPU": 1.0}
A10G = {"ray.io/accelerator-type": "A10G"}


def node(total: float, free: float, *, matches: bool = True, **rest: float) -> NodeRoom:
    return NodeRoom("id", matches, {"GPU": total, "CPU": 8.0, **rest}, {"GPU": free, "CPU": 8.0, **rest})


def test_a_shape_fits_where_all_of_it_is_free_on_one_selected_node() -> None:
    assert without_room([GPU, GPU], [node(8, 2)]) == []
    assert without_room([GPU, GPU], [node(8, 1)]) == [GPU]
    assert without_room([{"GPU": 2.0}], [node(8, 1), node(8, 1)]) == [{"GPU": 2.0}]
    assert without_room([GPU], [node(8, 8, matches=False)]) == [GPU]
    assert without_room([{"GPU": 1.0, "CPU": 9.0}], [node(8, 8)]) == [{"GPU": 1.0, "CPU": 9.0}]
    assert without_room([{"TPU": 1.0}], [node(8, 8)]) == [{"TPU": 1.0}]


def test_large_shapes_are_placed_first_and_fractions_add_up() -> None:
    assert without_room([GPU, {"GPU": 2.0}], [node(2, 2), node(1, 1)]) == []
    assert without_room([{"GPU": 0.1}] * 10, [node(1, 1)]) == []


def test_the_request_is_the_cluster_as_it_is_and_what_is_missing() -> None:
    nodes = [node(8, 1), node(4, 4, matches=False), NodeRoom("head", False, {"CPU": 4.0}, {"CPU": 4.0})]
    request = request_for([GPU, GPU], nodes, NodeSelector(labels=A10G))
    assert request == Request(({"GPU": 8.0}, {"GPU": 4.0}, GPU), (A10G, {}, A10G))


def test_where_there_is_room_the_request_only_holds_the_nodes() -> None:
    assert request_for([GPU], [node(8, 1)], NodeSelector()) == Request(({"GPU": 8.0},), ({},))


def test_a_new_node_is_one_that_the_spec_selects_and_takes_as_many_replicas_as_fit() -> None:
    request = request_for([GPU] * 3, [], NodeSelector(resources={"GPU": 2.0, "fast_disk": 1.0}))
    assert request.shapes == ({"GPU": 2.0, "fast_disk": 1.0},) * 2


@pytest.mark.parametrize("ends_by", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_stands_when_the_block_has_ended(ends_by: type[BaseException] | None) -> None:
    asked: list[Request] = []
    request = Request((GPU,), ({},))

    def block() -> None:
        with standing(request, asked.append):
            assert asked == [request]
            if ends_by:
                raise ends_by

    if ends_by:
        with pytest.raises(ends_by):
            block()
    else:
        block()
    assert asked == [request, Request()]


def test_a_request_that_fails_half_way_is_cleared_too() -> None:
    asked: list[Request] = []

    def ask(request: Request) -> None:
        asked.append(request)
        if request.shapes:
            raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"), standing(Request((GPU,), ({},)), ask):
        pytest.fail("the block must not run")
    assert asked[-1] == Request()


def test_what_cannot_be_cleared_is_said_and_hides_nothing(caplog: Any) -> None:
    def ask(request: Request) -> None:
        if not request.shapes:
            raise ConnectionError("gone")

    with pytest.raises(KeyError, match="first"), standing(Request((GPU,), ({},)), ask):
        raise KeyError("first")
    assert "request_resources(bundles=[])" in caplog.text
