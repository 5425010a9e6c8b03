"""A captured cache is signed where the capture was asked for, and not on the node that has published it."""

from __future__ import annotations

import json

import pytest

from llm_prefetch.capturing.capture import CaptureReport, _sign
from llm_prefetch.capturing.capture_node import Captured
from llm_prefetch.errors import OriginChangedError
from llm_prefetch.publish import publish
from llm_prefetch.resolve import resolve
from llm_prefetch.signatures import OUTDATED, require_signature
from tests.caches.made import ANY, CACHE
from tests.samples import make_artifact, make_folder
from tests.signing import make_key, signature_at

KEY = make_key()


@pytest.fixture
def uri(tmp_path):
    return f"file://{tmp_path}/cache"


def _capture(tmp_path, uri, outdated=False):
    """As a node answers it."""
    published = publish(make_folder(tmp_path / "left", CACHE), uri, identity=ANY.to_manifest())
    return Captured(published, {}, {}, {}, outdated_signature=outdated)


def test_what_the_node_has_published_is_signed(tmp_path, uri):
    said, captured = [], _capture(tmp_path, uri)
    assert _sign(captured, uri, KEY, said.append) == KEY.public
    assert said == [f"signing {captured.published.version}"]
    cache = resolve(make_artifact(uri, kind="compile-cache"))
    assert require_signature(cache, [KEY.public]).key == captured.published.version
    report = CaptureReport("llama", uri, "10.0.0.1", captured, signed_by=KEY.public)
    assert json.loads(json.dumps(report.facts()))["signed_by"] == KEY.public


def test_what_was_put_in_its_place_since_is_not_signed(tmp_path, uri):
    captured = _capture(tmp_path, uri)
    publish(make_folder(tmp_path / "others", {"model": b"a virus"}), uri)
    with pytest.raises(OriginChangedError, match="not signed"):
        _sign(captured, uri, KEY, lambda _line: None)
    assert not signature_at(tmp_path / "cache").exists()


@pytest.mark.parametrize("outdated", [True, False])
def test_without_a_key_nothing_is_signed_and_an_old_signature_is_named(tmp_path, uri, outdated):
    said = []
    assert _sign(_capture(tmp_path, uri, outdated), uri, None, said.append) == ""
    assert said == [OUTDATED] * outdated
    assert not signature_at(tmp_path / "cache").exists()
