"""The number of ranges follows what brings bytes."""

from __future__ import annotations

from statistics import median

import pytest

from llm_prefetch.transfer.concurrency import START, Concurrency

MOST = 64


def settle(rate_at, busy_at=lambda limit: 0.2, failures_at=lambda limit: 0, windows=40):
    """Let it decide for `windows` windows on a link whose rate depends on the limit; every limit it tried."""
    concurrency, limits = Concurrency(MOST), []
    for _ in range(windows):
        limits.append(concurrency.limit)
        limit = concurrency.limit
        concurrency.observe(rate_at(limit), busy=busy_at(limit), failures=failures_at(limit))
    return limits


def test_a_link_that_each_connection_gets_a_part_of_is_filled():
    limits = settle(lambda limit: 50e6 * limit)
    assert limits[0] == START
    assert limits[-1] == MOST


def test_a_step_that_brings_nothing_is_taken_back():
    limits = settle(lambda limit: 1e9)
    assert max(limits) == START * 2
    assert limits[-1] == START
    assert limits.count(START) > 3 * (len(limits) - limits.count(START))


@pytest.mark.parametrize("connections", [3, 7, 20, 50])
def test_a_link_is_filled_and_not_much_more(connections):
    limits = settle(lambda limit: 50e6 * min(limit, connections))
    assert connections / 2 <= median(limits[10:]) <= connections * 2


def test_a_busy_machine_is_not_given_more_to_do():
    assert set(settle(lambda limit: 50e6 * limit, busy_at=lambda limit: 0.9)) == {START}


def test_nothing_that_arrives_is_no_reason_for_more():
    assert set(settle(lambda limit: 0.0)) == {START}


def test_an_overloaded_origin_is_asked_for_less_until_it_recovers():
    limits = settle(
        lambda limit: 50e6 * limit, failures_at=lambda limit: limit if limit > 16 else 0, windows=12
    )
    assert limits[:5] == [4, 8, 16, 32, 16]
    assert limits[-1] == 16


def test_it_never_goes_below_one_or_above_its_most():
    assert min(settle(lambda limit: 1.0, failures_at=lambda limit: limit + 1)) == 1
    assert Concurrency(3).limit == 3
    assert Concurrency(1).limit == 1
