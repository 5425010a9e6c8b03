"""No secret of a URI reaches a log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_prefetch.redact import redact


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("s3://key:secret@bucket/prefix", "s3://bucket/prefix"),
        ("s3://anonymous@bucket/prefix", "s3://anonymous@bucket/prefix"),
        ("s3:///prefix", "s3:///prefix"),
        (
            "abfss://container@account.dfs.core.windows.net/x?sig=secret",
            "abfss://container@account.dfs.core.windows.net/x",
        ),
        ("abfss://key:secret@account.dfs.core.windows.net/x", "abfss://account.dfs.core.windows.net/x"),
        ("gs://anonymous@bucket/x", "gs://anonymous@bucket/x"),
        ("gs://secret@bucket/x", "gs://bucket/x"),
        ("https://host/x?X-Amz-Signature=secret#secret", "https://host/x"),
        ("https://user:pa@ss@host:8080/x", "https://host:8080/x"),
        ("hf://org/repo@main", "hf://org/repo@main"),
        ("file:///mnt/a?b#c", "file:///mnt/a?b#c"),
        ("s3://[x/y", "s3://[x/y"),
        ("no uri", "no uri"),
    ],
)
def test_only_scheme_host_and_path_are_left(uri, shown):
    assert redact(uri) == shown


@given(st.text(max_size=30), st.sampled_from(["s3", "https", "gs", "abfss"]))
def test_redacting_twice_changes_nothing_more(rest, scheme):
    once = redact(f"{scheme}://{rest}")
    assert redact(once) == once


@given(st.text(max_size=20))
def test_user_info_query_and_fragment_never_show(path):
    for uri in (
        f"s3://user:s3cret@bucket/{path}",
        f"https://host/{path}?s3cret",
        f"https://host/{path}#s3cret",
    ):
        assert "s3cret" not in redact(uri)
