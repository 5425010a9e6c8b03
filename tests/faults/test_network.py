"""Whatever the way to the origin does: the right artifact, or one clear error; never a wrong byte."""

from __future__ import annotations

import random
import threading

import pytest

from llm_prefetch.errors import DigestError, OriginUnavailableError, PrefetchError
from tests.faults.conftest import CHUNK, FILES, WEIGHTS
from tests.real.faults import flip, reset, silence, stall, status, truncate, wrong_length, wrong_range
from tests.samples import raises

pytestmark = pytest.mark.cloud
PASSING = {
    "reset before the answer": reset,
    "reset amid the body": lambda: reset(after=1000),
    "cut body": lambda: truncate(1000),
    "no body": lambda: truncate(0),
    "too short a length": lambda: wrong_length(-7),
    "another range": lambda: wrong_range(5),
    "400 RequestTimeout": lambda: status(400, store_code="RequestTimeout"),
    "429": lambda: status(429),
    "500": lambda: status(500),
    "502": lambda: status(502),
    "503": lambda: status(503, store_code="SlowDown"),
    "504": lambda: status(504),
    "503 Retry-After": lambda: status(503, {"Retry-After": "1"}),
    "503 Retry-After nonsense": lambda: status(503, {"Retry-After": "-1"}),
}
SILENT = {
    "silence": silence,
    "stall before the body": lambda: stall(0),
    "stall amid the body": lambda: stall(1000),
    "trickle": lambda: stall(1000, every=0.1),
}


@pytest.mark.parametrize("what", PASSING)
def test_a_fault_that_passes_costs_a_retry(anywhere, what):
    rule = anywhere.proxy.inject(PASSING[what](), WEIGHTS, ranges=True)
    anywhere.stage()
    assert rule.hits == 1
    assert len(anywhere.asked(WEIGHTS)) == (4 if anywhere.published else 1) + 1
    anywhere.assert_right()


@pytest.mark.parametrize("what", SILENT)
def test_an_origin_that_stalls_is_asked_again(anywhere, what, quick):
    rule = anywhere.proxy.inject(SILENT[what](), WEIGHTS, ranges=True)
    anywhere.stage()
    assert rule.hits == 1
    anywhere.assert_right()


@pytest.mark.parametrize("what", PASSING)
def test_a_fault_that_stays_is_told_and_leaves_nothing_behind(origin, what, settings):
    settings.setenv("LLM_PREFETCH_ATTEMPTS", "2")
    rule = origin.proxy.inject(PASSING[what](), WEIGHTS, ranges=True, times=None)
    with raises(OriginUnavailableError, 3, WEIGHTS, origin.uri):
        origin.stage()
    assert rule.hits >= 2
    origin.assert_nothing_committed()
    origin.assert_heals()


@pytest.mark.parametrize("what", SILENT)
def test_an_origin_that_goes_on_to_stall_is_given_up(origin, what, quick, settings):
    settings.setenv("LLM_PREFETCH_ATTEMPTS", "2")
    rule = origin.proxy.inject(SILENT[what](), WEIGHTS, ranges=True, times=None)
    with raises(OriginUnavailableError, 3, WEIGHTS, origin.uri):
        origin.stage()
    assert rule.hits >= 2
    origin.assert_nothing_committed()
    origin.assert_heals()


def test_a_length_beyond_the_range_changes_nothing(origin):
    rule = origin.proxy.inject(wrong_length(+7), WEIGHTS, ranges=True, times=None)
    origin.stage()
    assert rule.hits >= 1
    origin.assert_right()


@pytest.mark.parametrize("at", [0, CHUNK // 2, -1])
def test_a_bit_that_flips_once_is_fetched_again(published, at):
    rule = published.proxy.inject(flip(at), WEIGHTS, ranges=True)
    published.stage()
    assert rule.hits == 1
    published.assert_right()


@pytest.mark.parametrize("at", [0, CHUNK // 2, -1])
def test_bits_that_always_flip_are_refused(published, at):
    rule = published.proxy.inject(flip(at), WEIGHTS, ranges=True, times=None)
    with raises(DigestError, 5, WEIGHTS, published.uri):
        published.stage()
    assert rule.hits >= 2
    published.assert_nothing_committed()
    published.assert_heals()


@pytest.mark.parametrize("seed", range(12))
def test_a_manifest_with_a_flipped_bit_never_makes_an_artifact(published, seed):
    rng = random.Random(seed)
    rule = published.proxy.inject(flip(rng.randrange(-500, 500)), r"manifest\.json", times=None)
    with pytest.raises(PrefetchError) as caught:
        published.stage()
    assert caught.value.exit_code in (3, 5)
    assert caught.value.hint
    assert rule.hits >= 1
    published.assert_nothing_committed()
    published.assert_heals()


def _inject_into_what_is_asked_first(origin, fault, **how):
    if origin.published:
        return origin.proxy.inject(fault, r"manifest\.json", **how)
    return origin.proxy.inject(fault, lists=True, **how)


@pytest.mark.parametrize(
    "fault", [reset, lambda: status(500), lambda: status(503)], ids=["reset", "500", "503"]
)
def test_a_fault_of_the_manifest_or_the_listing_passes(origin, fault):
    rule = _inject_into_what_is_asked_first(origin, fault())
    origin.stage()
    assert rule.hits == 1
    origin.assert_right()


@pytest.mark.parametrize("fault", [lambda: truncate(100), lambda: status(503)], ids=["cut", "503"])
def test_a_manifest_or_a_listing_that_cannot_be_read_is_told(origin, fault):
    rule = _inject_into_what_is_asked_first(origin, fault(), times=None)
    with raises(OriginUnavailableError, 3, origin.uri):
        origin.stage()
    assert rule.hits >= 1
    origin.assert_nothing_committed()
    origin.assert_heals()


def test_a_manifest_or_a_listing_that_stalls_is_asked_for_again(origin, quick):
    rule = _inject_into_what_is_asked_first(origin, silence())
    origin.stage()
    assert rule.hits == 1
    origin.assert_right()


def test_what_the_origin_asks_for_by_retry_after_is_waited_for(published, settings):
    settings.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    published.proxy.inject(status(503, {"Retry-After": "2"}), WEIGHTS, ranges=True)
    published.stage()
    first, second, *_ = published.asked(WEIGHTS)
    assert second - first >= 2
    published.assert_right()


def test_an_origin_that_is_down_is_not_asked_without_end(published):
    rule = published.proxy.inject(status(503), ranges=True, times=None)
    with raises(OriginUnavailableError, 3, published.uri):
        published.stage()
    chunks = sum(-(-len(data) // CHUNK) for data in FILES.values())
    assert rule.hits <= 3 * chunks
    published.assert_heals()


def test_what_came_before_the_fault_is_kept(published, settings):
    settings.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    rule = published.proxy.inject(status(503), WEIGHTS, skip=2, ranges=True, times=None)
    with raises(OriginUnavailableError, 3):
        published.stage()
    assert rule.hits == 3
    before = len(published.asked(WEIGHTS))
    published.assert_heals()
    assert len(published.asked(WEIGHTS)) == before + 2


@pytest.mark.parametrize("what", SILENT)
def test_a_staging_that_is_cancelled_ends_though_nobody_answers(origin, what, settings):
    settings.setenv("LLM_PREFETCH_STALL_SECONDS", "200")
    rule = origin.proxy.inject(SILENT[what](), ranges=True, times=None)
    stop, errors = threading.Event(), []

    def work():
        try:
            origin.stage(stop=stop)
        except PrefetchError as error:
            errors.append(error)

    staging = threading.Thread(target=work)
    staging.start()
    while not rule.hits:
        assert staging.is_alive()
        staging.join(0.05)
    stop.set()
    staging.join(10)
    assert not staging.is_alive()
    assert "cancelled" in str(errors[0])
    origin.assert_nothing_committed()
    origin.assert_heals()


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_day(published, quick, settings, seed):
    """One request in five fails, each in its own way; with tries enough, all comes right."""
    settings.setenv("LLM_PREFETCH_ATTEMPTS", "10")
    rng, lock = random.Random(seed), threading.Lock()
    kinds = [*PASSING.values(), *SILENT.values()]
    happened = []

    def fault(exchange):
        with lock:
            unlucky = rng.random() < 0.2
            kind = rng.choice(kinds)
        if unlucky:
            happened.append(kind)
            kind()(exchange)
        else:
            exchange.send(exchange.forward())

    published.proxy.inject(fault, ranges=True, times=None)
    published.stage()
    assert happened or published.proxy.requests
    published.assert_right()
