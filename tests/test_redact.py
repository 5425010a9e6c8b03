"""No secret of a URI, or of what another program says, reaches a log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_prefetch.redact import redact, redact_text


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
        ("me:secret@host/x", "host/x"),
        ("org/repo@main", "org/repo@main"),
        ("/mnt/a:b@c/d?e=f", "/mnt/a:b@c/d?e=f"),
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


@pytest.mark.parametrize(
    "text",
    [
        "GET https://me:s3cret@host/x?sig=s3cret failed",
        "url (HTTPS://me:s3cret@host/x) and s3://key:s3cret@bucket",
        "cannot parse 'me:s3cret@host/x'",
        "URL can't contain control characters. '/a b?X-Amz-Signature=s3cret' (found at least ' ')",
        "/prefix%3FX-Amz-Signature%3Ds3cret%2F.llm-prefetch",
        "GET /x?token=s3cret&other=s3cret HTTP/1.1",
        "Authorization: Bearer s3cret",
        "{'Authorization': 'AWS4-HMAC-SHA256 s3cret'}",
        '"authorization": "Basic s3crets3cret"',
        "Proxy-Authorization: Basic s3cret",
        "sent Bearer s3crets3crets3cret",
        "AccountKey=s3cret;EndpointSuffix=core.windows.net",
        "SharedAccessSignature=s3cret",
        "sv=2024-01-01&sig=s3cret&se=x",
        "x-amz-security-token:s3cret",
        "X-Amz-Credential=s3cret/20260101",
        "aws_secret_access_key = s3cret",
        "HF_TOKEN=s3cret",
        "api-key: s3cret",
        "password='s3cret'",
        "Set-Cookie: s3cret",
        "x " * 3000 + "https://me:s3cret@host",
        "x " * 990 + "https://me:s3crets3crets3cret@host",
    ],
)
def test_what_another_program_says_is_shown_without_secrets(text):
    assert "s3c" not in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "[Errno 111] Connection refused",
        "503 Slow Down",
        "Error performing GET http://host/bucket/x in 1ms",
        "hostname 'a' doesn't match 'b'",
        "the token expired at 12:30:05",
        "is this a question? yes",
        "s3://anonymous@bucket/x: no such key",
        "a basic error: no bearer of news",
    ],
)
def test_what_holds_no_secret_stays_as_it_is(text):
    assert redact_text(text) == text


@given(st.text(max_size=60))
def test_redacting_a_text_twice_changes_nothing_more(text):
    once = redact_text(text)
    assert redact_text(once) == once


@pytest.mark.parametrize("odd", ["%3F", "a-", "?", "s3://", "token", "a:", "sig=", "Bearer "])
def test_no_text_takes_long(odd):
    redact_text(odd * 10**6)
