"""A cap holds over all workers, and retries end."""

from __future__ import annotations

import pytest

from llm_prefetch.errors import DigestError, OriginAccessError, OriginUnavailableError
from llm_prefetch.transfer.pacing import Retries, Throttle
from tests.transfer.running import unavailable


def test_no_limit_lets_everything_pass():
    assert Throttle().delay(10**18) == 0


def test_each_piece_waits_for_those_before_it():
    throttle = Throttle(100.0)
    delays = [throttle.delay(50) for _ in range(4)]
    assert delays == pytest.approx([0, 0.5, 1.0, 1.5], abs=0.1)


def test_a_share_is_a_limit_of_its_own():
    throttle = Throttle()
    throttle.share(100.0)
    assert [throttle.delay(100), throttle.delay(100)] == pytest.approx([0, 1.0], abs=0.1)
    throttle.share(1000.0)
    throttle.delay(100)
    assert throttle.delay(100) == pytest.approx(2.1, abs=0.1)


def test_a_share_never_lifts_the_limit_of_the_node():
    throttle = Throttle(100.0)
    throttle.share(1e9)
    throttle.delay(100)
    assert throttle.delay(0) == pytest.approx(1.0, abs=0.1)


def test_the_wait_grows_and_is_never_the_same_for_all():
    retries = Retries(1000, 1000)
    first = {retries.again(unavailable(), 1) for _ in range(20)}
    fifth = {retries.again(unavailable(), 5) for _ in range(20)}
    assert len(first) == len(fifth) == 20
    assert max(first) < min(fifth)
    assert max(fifth) <= 20


def test_only_what_may_pass_is_tried_again():
    retries = Retries(1, 1)
    refused = OriginAccessError("no")
    with pytest.raises(OriginAccessError) as caught:
        retries.again(refused, 1)
    assert caught.value is refused
    wrong = DigestError("wrong")
    retries.again(wrong, 1)
    with pytest.raises(DigestError):
        retries.again(wrong, 2)


def test_a_range_has_so_many_tries(monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", "3")
    retries, error = Retries(1, 1), unavailable()
    retries.again(error, 1)
    retries.again(error, 2)
    with pytest.raises(OriginUnavailableError) as caught:
        retries.again(error, 3)
    assert caught.value is error


def test_patience_asked_for_is_bounded():
    retries, busy = Retries(1, 1), unavailable("429")
    busy.retry_after = 86400.0
    retries.again(busy, 1)
    assert 50 < retries.delay() <= 60
