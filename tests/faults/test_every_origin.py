"""The faults that matter most, at every origin and by either transport; `test_network.py` has all of them, for S3."""

from __future__ import annotations

import pytest

from llm_prefetch.errors import DigestError, OriginChangedError, OriginNotFoundError, OriginUnavailableError
from tests.faults.conftest import FILES, WEIGHTS
from tests.faults.doors import DOORS
from tests.real.faults import first, flip, reset, stall, status, truncate, wrong_length
from tests.samples import raises

pytestmark = pytest.mark.cloud
PATH = next(path for path in FILES if WEIGHTS in path)
OTHER = bytes(byte ^ 0xFF for byte in FILES[PATH])
PASSING = {
    "reset amid the body": lambda: reset(after=1000),
    "cut body": lambda: truncate(1000),
    "too short a length": lambda: wrong_length(-7),
    "503": lambda: status(503, store_code="SlowDown"),
}


def _at(where):
    """Run a test where this holds of the door."""
    names = [name for name, door in DOORS.items() if name not in ("s3", "s3-listed") and where(door)]
    return pytest.mark.parametrize("elsewhere", names, indirect=True)


PUBLISHED = _at(lambda door: door.published)
LISTED = _at(lambda door: not door.published and door.scheme != "hf")  # the proxy stands at the Hub's CDN
CHANGING = _at(lambda door: door.scheme != "hf")  # a commit does not change
DIGESTED = _at(lambda door: door.published or door.scheme == "hf")  # the Hub's listing states digests


@pytest.fixture
def patience(elsewhere, settings):
    """Little where nothing comes; s3fs needs some to get ready, which counts as well."""
    settings.setenv("LLM_PREFETCH_STALL_SECONDS", "2" if elsewhere.door.transport == "fsspec" else "0.5")


@pytest.mark.parametrize("what", PASSING)
def test_a_fault_that_passes_costs_a_retry(elsewhere, what):
    rule = elsewhere.proxy.inject(PASSING[what](), elsewhere.weights, ranges=True)
    elsewhere.stage()
    assert rule.hits == 1
    elsewhere.assert_right()


def test_an_origin_that_stalls_is_asked_again(elsewhere, patience):
    rule = elsewhere.proxy.inject(stall(1000), elsewhere.weights, ranges=True)
    elsewhere.stage()
    assert rule.hits == 1
    elsewhere.assert_right()


def test_a_fault_that_stays_is_told_and_leaves_nothing_behind(elsewhere, patience, settings):
    settings.setenv("LLM_PREFETCH_ATTEMPTS", "2")
    rule = elsewhere.proxy.inject(truncate(1000), elsewhere.weights, ranges=True, times=None)
    with raises(OriginUnavailableError, 3, elsewhere.uri):
        elsewhere.stage()
    assert rule.hits >= 2
    elsewhere.assert_nothing_committed()
    elsewhere.assert_heals()


def test_an_object_that_is_not_there_any_more_is_told(elsewhere):
    rule = elsewhere.proxy.inject(status(404), elsewhere.weights, ranges=True, times=None)
    with raises(OriginNotFoundError, 3, elsewhere.uri):
        elsewhere.stage()
    assert rule.hits >= 1
    elsewhere.assert_nothing_committed()
    elsewhere.assert_heals()


@CHANGING
def test_an_object_that_is_deleted_midway_is_told(elsewhere):
    rule = elsewhere.proxy.inject(first(lambda: elsewhere.delete(PATH)), WEIGHTS, ranges=True, times=None)
    # Azure's emulator says of what is not there that it does not match.
    conditional = elsewhere.door.scheme == "az" and not elsewhere.published
    with raises(OriginChangedError if conditional else OriginNotFoundError, 3, WEIGHTS, elsewhere.uri):
        elsewhere.stage()
    assert rule.hits >= 1
    elsewhere.assert_nothing_committed()
    elsewhere.put(PATH, FILES[PATH])
    elsewhere.assert_heals()


@CHANGING
@pytest.mark.parametrize("other", [OTHER, OTHER[:-1]], ids=["other bytes", "shorter"])
def test_an_object_that_is_overwritten_after_it_was_listed_is_not_taken_for_the_old_one(elsewhere, other):
    rule = elsewhere.proxy.inject(first(lambda: elsewhere.put(PATH, other)), WEIGHTS, ranges=True, times=None)
    kind = DigestError if elsewhere.published and len(other) == len(OTHER) else OriginChangedError
    with raises(kind, 5 if kind is DigestError else 3, WEIGHTS, elsewhere.uri):
        elsewhere.stage()
    assert rule.hits >= 1
    elsewhere.assert_nothing_committed()
    if elsewhere.published:
        elsewhere.publish()
    elsewhere.assert_heals()


@PUBLISHED
def test_a_bit_that_flips_once_is_fetched_again(elsewhere):
    rule = elsewhere.proxy.inject(flip(-1), WEIGHTS, ranges=True)
    elsewhere.stage()
    assert rule.hits == 1
    elsewhere.assert_right()


@DIGESTED
def test_bits_that_always_flip_are_refused(elsewhere):
    rule = elsewhere.proxy.inject(flip(-1), elsewhere.weights, ranges=True, times=None)
    with raises(DigestError, 5, elsewhere.uri):
        elsewhere.stage()
    assert rule.hits >= 1
    elsewhere.assert_nothing_committed()
    elsewhere.assert_heals()


@LISTED
@pytest.mark.parametrize(
    "fault", [reset, lambda: truncate(100), lambda: status(503)], ids=["reset", "cut", "503"]
)
def test_a_fault_of_the_listing_passes(elsewhere, fault):
    rule = elsewhere.proxy.inject(fault(), lists=True)
    elsewhere.stage()
    assert rule.hits == 1
    elsewhere.assert_right()
