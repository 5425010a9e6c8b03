"""An origin that changes, or shuts its door, while it is read: one version of it, or one clear error."""

from __future__ import annotations

import random

import pytest

from llm_prefetch.errors import (
    DigestError,
    OriginAccessError,
    OriginChangedError,
    OriginNotFoundError,
    OriginUnavailableError,
)
from llm_prefetch.manifest import CHUNK_BYTES
from tests.faults.conftest import FILES, WEIGHTS
from tests.real.faults import first, status, then
from tests.samples import raises

pytestmark = pytest.mark.cloud
PATH = next(path for path in FILES if WEIGHTS in path)
OTHER = bytes(byte ^ 0xFF for byte in FILES[PATH])


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId"])
def test_403_midway_is_told_at_once(origin, code):
    rule = origin.proxy.inject(status(403, store_code=code), WEIGHTS, ranges=True, times=None)
    with raises(OriginAccessError, 3, WEIGHTS, origin.uri, code, "credentials"):
        origin.stage()
    assert 1 <= rule.hits <= 4  # each worker once
    origin.assert_nothing_committed()
    origin.assert_heals()


EXPIRED = [
    (403, "ExpiredToken"),
    (400, "ExpiredToken"),
    (403, "RequestExpired"),
    (403, "RequestTimeTooSkewed"),
]


@pytest.mark.parametrize(("code", "name"), EXPIRED)
def test_credentials_that_expire_midway_are_asked_for_again(origin, settings, code, name):
    settings.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    rule = origin.proxy.inject(status(code, store_code=name), WEIGHTS, ranges=True)
    origin.stage()
    assert rule.hits == 1
    origin.assert_right()


@pytest.mark.parametrize(("code", "name"), EXPIRED)
def test_credentials_that_have_expired_for_good_are_told(origin, code, name):
    rule = origin.proxy.inject(status(code, store_code=name), WEIGHTS, ranges=True, times=None)
    says = "clock" if "Skewed" in name else "expired"
    with raises(OriginAccessError, 3, WEIGHTS, origin.uri, says):
        origin.stage()
    assert 1 <= rule.hits <= 8
    origin.assert_nothing_committed()
    origin.assert_heals()


def test_an_object_that_is_deleted_midway_is_told(origin):
    rule = origin.proxy.inject(first(lambda: origin.delete(PATH)), WEIGHTS, ranges=True, times=None)
    with raises(OriginNotFoundError, 3, WEIGHTS, origin.uri):
        origin.stage()
    assert rule.hits >= 1
    origin.assert_nothing_committed()
    origin.put(PATH, FILES[PATH])
    origin.assert_heals()


@pytest.mark.parametrize("other", [OTHER, OTHER[:-1], OTHER + b"x", b""])
def test_an_object_that_is_overwritten_after_it_was_listed_is_not_taken_for_the_old_one(origin, other):
    rule = origin.proxy.inject(first(lambda: origin.put(PATH, other)), WEIGHTS, ranges=True, times=None)
    kind = DigestError if origin.published and len(other) == len(OTHER) else OriginChangedError
    with raises(kind, 5 if kind is DigestError else 3, WEIGHTS, origin.uri):
        origin.stage()
    assert rule.hits >= 1
    origin.assert_nothing_committed()
    if origin.published:
        origin.publish()
    origin.assert_heals()


@pytest.mark.parametrize("skip", [1, 2, 3])
def test_half_of_one_object_and_half_of_another_never_make_a_file(published, settings, skip):
    settings.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    rule = published.proxy.inject(first(lambda: published.put(PATH, OTHER)), WEIGHTS, ranges=True, skip=skip)
    with raises(DigestError, 5, WEIGHTS):
        published.stage()
    assert rule.hits == 1
    published.assert_nothing_committed()
    published.put(PATH, FILES[PATH])
    published.assert_heals()


def test_a_large_object_without_digests_is_one_object_too(listed, settings):
    settings.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    old, new = (bytes([byte]) * (CHUNK_BYTES + 5) for byte in (1, 2))
    listed.put("large", old)
    rule = listed.proxy.inject(first(lambda: listed.put("large", new)), "large", ranges=True, skip=1)
    with raises(OriginChangedError, 3, "large", listed.uri):
        listed.stage()
    assert rule.hits == 1
    listed.assert_nothing_committed()
    listed.assert_heals()


def test_what_was_begun_of_an_older_listing_is_not_mixed_with_a_newer_one(listed, settings):
    settings.setenv("LLM_PREFETCH_CONCURRENCY", "1")
    old, new = (bytes([byte]) * (CHUNK_BYTES + 5) for byte in (1, 2))
    listed.put("large", old)
    listed.proxy.inject(status(503), "large", ranges=True, skip=1, times=None)
    with raises(OriginUnavailableError, 3):
        listed.stage()
    listed.put("large", new)
    listed.assert_heals()


# A listing has two objects on a page here, and changes between the pages.


@pytest.fixture
def paged(listed):
    listed.proxy.page_objects = 2
    return listed


def _pages(paged):
    return sum(request.lists for request in paged.proxy.requests)


def test_a_listing_of_many_pages_is_complete(paged):
    for number in range(7):
        paged.put(f"more/{number}", b"%d" % number)
    paged.stage()
    assert _pages(paged) >= 5
    paged.assert_right()


def test_an_object_that_goes_after_its_page_was_listed_is_told(paged):
    gone = min(FILES)
    rule = paged.proxy.inject(then(lambda: paged.delete(gone)), lists=True, times=None)
    with raises(OriginNotFoundError, 3, gone, paged.uri):
        paged.stage()
    assert rule.hits >= 2
    paged.assert_nothing_committed()
    paged.assert_heals()


def test_an_object_that_goes_before_its_page_is_listed_was_never_there(paged):
    gone = max(FILES)
    rule = paged.proxy.inject(then(lambda: paged.delete(gone)), lists=True, times=None)
    paged.stage()
    assert rule.hits >= 2
    paged.assert_right()


def test_an_object_that_comes_before_its_page_is_listed_is_staged(paged):
    rule = paged.proxy.inject(then(lambda: paged.put("zzz", b"new")), lists=True, times=None)
    paged.stage()
    assert rule.hits >= 2
    paged.assert_right()


def test_an_object_that_comes_after_its_page_was_listed_is_staged_by_the_next_one(paged):
    rule = paged.proxy.inject(then(lambda: paged.put("aaa", b"new")), lists=True, times=None)
    paged.stage()
    assert rule.hits >= 2
    paged.assert_nothing_wrong(FILES)
    paged.assert_heals()


def test_an_object_that_is_overwritten_after_its_page_was_listed_is_told(paged):
    path = min(FILES)
    other = random.Random(1).randbytes(len(FILES[path]))
    rule = paged.proxy.inject(then(lambda: paged.put(path, other)), lists=True, times=None)
    with raises(OriginChangedError, 3, path, paged.uri):
        paged.stage()
    assert rule.hits >= 2
    paged.assert_nothing_committed()
    paged.assert_heals()
