"""What an origin says instead of a range becomes the error that names the mend, and repeats none of its body."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from llm_prefetch.errors import OriginAccessError, OriginError, OriginUnavailableError
from llm_prefetch.origins.ranged_http import HttpReader
from tests.origins.misbehaving import DATA, ITEM, WHERE, Server
from tests.samples import raises

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def server(no_leaks) -> Iterator[Server]:
    with Server().running() as running:
        yield running


@pytest.fixture
def reader(server) -> Iterator[HttpReader]:
    made = HttpReader(lambda path: f"{server.url}{path}?X-Signature=s3cret", WHERE, 5.0)
    yield made
    made.close()


def _read(reader):
    body, taken, buffer = reader.open_range(ITEM, 0, ITEM.size), b"", memoryview(bytearray(ITEM.size))
    while count := body.readinto(buffer):
        taken += bytes(buffer[:count])
    return taken


def refuse(status, body="", **headers):
    """An answer of a server that gives no range."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request: request.send(status, {"Content-Length": len(body), **headers}, body.encode())


def xml(code, message="no"):
    return (
        f"<Error><Code>{code}</Code><Message>{message}</Message><StringToSign>s3cret</StringToSign></Error>"
    )


NOW = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Slow Down", "500 Oops", "502 Bad Gateway"])
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry_After": "7"}, 7.0),
        ({"Retry_After": " 1.5 "}, 1.5),
        ({"Retry_After": "0"}, 0.0),
        ({"Retry_After": "999999999"}, 3600.0),
        ({"Retry_After": "-5"}, None),
        ({"Retry_After": "soon"}, None),
        ({"Retry_After": "nan"}, None),
        ({"Retry_After": "1e9"}, None),
        ({"Retry_After": ""}, None),
        ({"Retry_After": "9" * 400}, None),
        ({"Retry_After": "Wed, 21 Oct 2015 07:28:30 GMT", "Date": NOW}, 30.0),
        ({"Retry_After": "Wed, 21 Oct 2015 07:28:30 -0000", "Date": NOW}, 30.0),
        ({"Retry_After": "Wed, 21 Oct 2015 07:27:30 GMT", "Date": NOW}, 0.0),
        ({"Retry_After": "Wed, 21 Oct 2099 07:28:00 GMT", "Date": NOW}, 3600.0),
        ({"Retry_After": "Wed, 21 Oct 2015 07:28:30 GMT"}, 0.0),
        ({"Retry_After": "Wed, 99 Oct 2015 07:28:30 GMT"}, None),
    ],
)
def test_an_overloaded_origin_says_when_to_come_back(server, reader, status, headers, seconds):
    server.answers = [refuse(status, **headers)]
    with raises(OriginUnavailableError, 3, status, WHERE) as caught:
        _read(reader)
    assert caught.value.retry_after == seconds
    assert pickle.loads(pickle.dumps(caught.value)).retry_after == seconds


EXPIRED = [
    ("400 Bad Request", xml("ExpiredToken", "The provided token has expired.")),
    ("403 Forbidden", xml("ExpiredToken")),
    ("403 Forbidden", xml("RequestExpired")),
    ("403 Forbidden", xml("AccessDenied", "Request has expired")),
    ("400 Bad Request", xml("TokenRefreshRequired")),
    ("403 Forbidden", xml("RequestTimeTooSkewed")),
    (
        "403 Server failed to authenticate the request",
        xml("AuthenticationFailed", "Signature not valid in the specified time frame"),
    ),
]


@pytest.mark.parametrize(("status", "body"), EXPIRED)
def test_what_was_signed_too_long_ago_is_signed_again_once(server, status, body):
    urls, renewed = ["old", "new"], []
    reader = HttpReader(lambda path: f"{server.url}{path}?{urls[0]}", WHERE, 5.0, renew=renewed.append)

    def renew(path):
        renewed.append(path)
        urls.pop(0)

    reader._renew = renew
    server.answers = [refuse(status, body)]
    assert _read(reader) == DATA
    reader.close()
    assert renewed == ["dir/x"]
    assert [request.line.split()[1].partition("?")[2] for request in server.requests] == ["old", "new"]


@pytest.mark.parametrize("renewable", [True, False])
@pytest.mark.parametrize(("status", "body"), EXPIRED)
def test_what_is_still_expired_then_is_a_refusal_that_says_so(server, renewable, status, body):
    renewed = []
    renew = renewed.append if renewable else None
    reader = HttpReader(lambda path: server.url + path, WHERE, 5.0, renew=renew)
    server.answers = [refuse(status, body)] * 2
    says = "clock" if "Skewed" in body else "expired"
    with raises(OriginAccessError, 3, says, "'dir/x'", WHERE) as caught:
        _read(reader)
    assert not caught.value.retryable
    assert "s3cret" not in str(caught.value)
    assert len(server.requests) == 1 + renewable == 1 + len(renewed)
    reader.close()


@pytest.mark.parametrize(
    ("status", "body"),
    [("403 Forbidden", xml("AccessDenied")), ("403 Forbidden", xml("InvalidAccessKeyId")), ("401 No", "")],
)
def test_any_other_refusal_is_not_asked_about_twice(server, status, body):
    renewed = []
    reader = HttpReader(lambda path: server.url + path, WHERE, 5.0, renew=renewed.append)
    server.answers = [refuse(status, body)]
    with raises(OriginAccessError, 3, "check the credentials"):
        _read(reader)
    reader.close()
    assert (renewed, len(server.requests)) == ([], 1)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("400 Bad Request", xml("RequestTimeout"), OriginUnavailableError),
        ("503 Service Unavailable", xml("SlowDown"), OriginUnavailableError),
        ("503 Service Unavailable", xml("RequestExpired"), OriginUnavailableError),
        ("400 Bad Request", xml("InvalidRequest"), OriginError),
        ("407 Proxy Authentication Required", "", OriginAccessError),
    ],
)
def test_the_stores_own_code_tells_what_may_pass(server, reader, status, body, kind):
    server.answers = [refuse(status, body)]
    with raises(kind, 3, "'dir/x'") as caught:
        _read(reader)
    if body:
        assert body.split("<Code>")[1].split("<")[0] in str(caught.value)


def test_azure_names_its_code_in_a_header(server, reader):
    server.answers = [refuse("503 The server is busy.", x_ms_error_code="ServerBusy")]
    with raises(OriginUnavailableError, 3, "ServerBusy"):
        _read(reader)


def test_a_body_that_never_comes_hides_no_status(server):
    def answer(request):
        request.send("503 Slow Down", {"Content-Length": 100}, b"<Error>")
        server.ended.wait()

    reader = HttpReader(lambda path: server.url + path, WHERE, 0.2)
    server.answers = [answer]
    with raises(OriginUnavailableError, 3, "503 Slow Down"):
        _read(reader)
    assert _read(reader) == DATA
    reader.close()


def test_an_endless_reason_is_cut(server, reader):
    server.answers = [refuse("503 " + "x " * 2500)]
    with raises(OriginUnavailableError, 3, "503 x x x") as caught:
        _read(reader)
    assert len(str(caught.value)) < 300
