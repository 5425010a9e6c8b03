"""`publish --sign` and `sign`: who publishes vouches for it, at once or later."""

from __future__ import annotations

import pytest

from llm_prefetch.resolve import resolve
from llm_prefetch.signatures import OUTDATED, SigningKey, require_signature
from tests.samples import make_artifact
from tests.signing import make_key, make_key_file

KEY, OTHER = make_key(1), make_key(2)


def _signed_by(uri: str, key: SigningKey) -> bool:
    source = resolve(make_artifact(uri, kind="plugin"))
    return require_signature(source, [key.public]).signed_by == key.public


@pytest.fixture
def key(tmp_path):
    return make_key_file(tmp_path)


def test_publish_signs_and_says_so(run, model, tmp_path, key):
    uri = f"file://{tmp_path}/origin"
    dry = run("publish", model, uri, "--sign", key, "--dry-run")
    assert dry.out.splitlines()[-1] == f"signed by: {KEY.public}"
    assert not (tmp_path / "origin").exists()
    done = run("publish", model, uri, "--sign", key, "--json").json
    assert done["signed_by"] == KEY.public
    assert _signed_by(uri, KEY)


def test_a_key_that_is_no_use_is_found_before_anything_is_uploaded(run, model, tmp_path):
    done = run("publish", model, f"file://{tmp_path}/origin", "--sign", make_key_file(tmp_path, mode=0o644))
    assert (done.code, len(done.err.splitlines())) == (5, 1)
    assert not (tmp_path / "origin").exists()


def test_what_is_published_is_signed_later_by_another_key(run, model, tmp_path, key):
    uri = f"file://{tmp_path}/origin"
    version = run("publish", model, uri, "--sign", key, "--json").json["version"]
    done = run("sign", uri, version, make_key_file(tmp_path, 2))
    assert (done.code, done.out) == (0, f"signed by: {OTHER.public}\n")
    assert _signed_by(uri, OTHER)


def test_publishing_another_version_without_the_key_says_that_it_is_not_signed(run, model, tmp_path, key):
    uri = f"file://{tmp_path}/origin"
    run("publish", model, uri, "--sign", key)
    assert OUTDATED not in run("publish", model, uri).err
    (model / "config.json").write_text("{}")
    assert OUTDATED in run("publish", model, uri).err
    assert OUTDATED not in run("publish", model, uri, "--sign", key).err
