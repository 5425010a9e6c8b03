"""A signature is read and written as a manifest is, at whatever origin: here at a real S3 API."""

from __future__ import annotations

import pytest

from llm_prefetch.errors import TrustError
from llm_prefetch.publish import publish
from llm_prefetch.resolve import resolve
from llm_prefetch.signatures import is_outdated, require_signature, sign_published
from tests.samples import make_artifact, make_folder, make_manifest
from tests.signing import make_key

KEY = make_key()


@pytest.mark.cloud
def test_what_is_published_in_a_bucket_is_signed_and_verified_there(s3, tmp_path):
    uri = f"s3://{s3.create_bucket('signed')}/plugins"
    published = publish(make_folder(tmp_path / "source"), uri)
    artifact = make_artifact(uri, kind="plugin")
    with pytest.raises(TrustError, match="it is not signed"):
        require_signature(resolve(artifact), [KEY.public])
    sign_published(uri, published.version, KEY)
    source = require_signature(resolve(artifact), [KEY.public])
    assert (source.artifact.version, source.signed_by) == (published.version, KEY.public)
    assert not is_outdated(uri, published.version)
    assert is_outdated(uri, make_manifest().version)
