"""What is asked before a byte moves, lists, heads and manifests: again after a fault, and no longer than is wanted."""

from __future__ import annotations

import threading

import pytest

from llm_prefetch.errors import OriginUnavailableError, PrefetchError
from llm_prefetch.resolve import resolve
from llm_prefetch.stop import Stop
from tests.faults.conftest import FILES
from tests.real.fault_proxy import fault_proxy
from tests.real.faults import silence, stall, status, truncate
from tests.real.hub import TOKEN, Repo
from tests.samples import make_artifact, make_manifest, raises

pytestmark = pytest.mark.cloud
OBSTORES_TRIES = 5
"""How often obstore asks by itself."""


def _what_is_asked(origin):
    return {"lists": True} if not origin.published else {"path": r"manifest\.json"}


@pytest.mark.parametrize(
    ("fault", "times"),
    [(lambda: status(503), OBSTORES_TRIES + 1), (lambda: truncate(100), 2)],
    ids=["503", "cut"],
)
def test_a_fault_that_outlasts_the_client_is_outlasted(origin, fault, times):
    rule = origin.proxy.inject(fault(), times=times, **_what_is_asked(origin))
    origin.stage()
    assert rule.hits == times
    origin.assert_right()


def test_half_a_listing_is_asked_for_from_its_start(listed):
    listed.proxy.page_objects = 2
    rule = listed.proxy.inject(status(503), lists=True, skip=1, times=OBSTORES_TRIES)
    listed.stage()
    assert rule.hits == OBSTORES_TRIES
    listed.assert_right()


def test_the_tries_are_bounded(origin, settings):
    settings.setenv("LLM_PREFETCH_ATTEMPTS", "2")
    rule = origin.proxy.inject(status(503), times=None, **_what_is_asked(origin))
    with raises(OriginUnavailableError, 3, origin.uri):
        origin.stage()
    assert OBSTORES_TRIES < rule.hits <= 2 * OBSTORES_TRIES
    origin.assert_heals()


@pytest.mark.parametrize("what", [silence, lambda: stall(10)], ids=["silence", "stall"])
def test_it_ends_when_it_is_cancelled_though_nobody_answers(origin, what, settings):
    settings.setenv("LLM_PREFETCH_STALL_SECONDS", "200")
    rule = origin.proxy.inject(what(), times=None, **_what_is_asked(origin))
    cancelled, errors = threading.Event(), []

    def work():
        try:
            resolve(origin.artifact, stop=Stop(cancelled))
        except PrefetchError as error:
            errors.append(error)

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    while not rule.hits:
        assert asking.is_alive()
        asking.join(0.05)
    cancelled.set()
    asking.join(20)
    assert not asking.is_alive()
    assert "cancelled" in str(errors[0])


def test_it_ends_with_the_deadline(listed, settings):
    settings.setenv("LLM_PREFETCH_STALL_SECONDS", "200")
    rule = listed.proxy.inject(silence(), lists=True, times=None)
    with pytest.raises(OriginUnavailableError, match="deadline of 1 s"):
        resolve(listed.artifact, stop=Stop(seconds=1))
    assert rule.hits == 1


def test_retry_after_is_waited_for_on_the_web(web_behind_proxy):
    rule = web_behind_proxy.proxy.inject(status(503, {"Retry-After": "2"}), r"manifest\.json")
    assert resolve(web_behind_proxy.artifact).content == make_manifest(FILES, 64 * 2**10)
    assert rule.hits == 1
    first, second, *_ = [request.at for request in web_behind_proxy.proxy.requests]
    assert second - first >= 2


@pytest.mark.parametrize("path", ["/api/models/org/model$", "/api/models/org/model/tree/"])
def test_the_hub_is_asked_again(hub_process, settings, path):
    repo = hub_process.repos["org/model"] = Repo()
    repo.commit(FILES)
    with fault_proxy(hub_process.endpoint) as proxy:
        settings.setenv("HF_ENDPOINT", proxy.endpoint)
        settings.setenv("HF_TOKEN", TOKEN)
        rule = proxy.inject(status(503, {"Retry-After": "1"}), path)
        source = resolve(make_artifact("hf://org/model"))
    assert rule.hits == 1
    assert {file.path for file in source.content.files} == set(FILES)
