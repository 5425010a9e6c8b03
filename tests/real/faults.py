"""What can happen to a request on its way to an origin and back: each is a `Fault` for `FaultProxy.inject`."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.real.fault_proxy import Answer, Exchange, Fault


def reset(after: int | None = None) -> Fault:
    """Reset the connection: before the answer, or after so many bytes of the body."""

    def fault(exchange: Exchange) -> None:
        if after is not None:
            _begin(exchange, after)
            exchange.hang(0.1)  # a reset overtakes what was sent just before it
        exchange.reset()

    return fault


def silence() -> Fault:
    """Take the request and never answer."""

    def fault(exchange: Exchange) -> None:
        exchange.hang()
        exchange.end()

    return fault


def stall(after: int, *, every: float | None = None) -> Fault:
    """Send so many bytes of the body and then no more, or one every so many seconds."""

    def fault(exchange: Exchange) -> None:
        rest = _begin(exchange, after)
        for byte in rest if every is not None else b"":
            if not exchange.hang(every):
                break
            exchange.handler.wfile.write(bytes([byte]))
        else:
            exchange.hang()
        exchange.end()

    return fault


def truncate(after: int) -> Fault:
    """Close the connection in good order after so many bytes of the body."""

    def fault(exchange: Exchange) -> None:
        _begin(exchange, after)
        exchange.end()

    return fault


def wrong_length(by: int) -> Fault:
    """Say that the body is so many bytes longer (or shorter) than it is, and send all of it."""

    def fault(exchange: Exchange) -> None:
        answer = exchange.forward()
        exchange.send(answer, length=len(answer.body) + by)
        exchange.end()

    return fault


def wrong_range(by: int) -> Fault:
    """Answer with a range that begins so many bytes later than the one that was asked for, and say so."""

    def fault(exchange: Exchange) -> None:
        first, last = (int(number) + by for number in re.findall(r"\d+", exchange.request.range))
        exchange.send(exchange.handler.forward(exchange.request.with_range(f"bytes={first}-{last}")))

    return fault


def status(
    code: int, headers: Mapping[str, str] | None = None, *, store_code: str = "InternalError"
) -> Fault:
    """Answer with an error instead of asking the origin."""

    def fault(exchange: Exchange) -> None:
        body = f"<Error><Code>{store_code}</Code><Message>injected</Message></Error>".encode()
        given = {"Content-Type": "application/xml", **(headers or {})}
        exchange.send(Answer(code, http.client.responses.get(code, "Injected"), given, body))

    return fault


def flip(at: int = 0) -> Fault:
    """Turn over one bit of the body."""

    def fault(exchange: Exchange) -> None:
        answer = exchange.forward()
        body = bytearray(answer.body)
        body[at] ^= 1
        exchange.send(replace(answer, body=bytes(body)))

    return fault


def first(action: Callable[[], object], *, times: int = 1) -> Fault:
    """Do something before the origin is asked, such as to change an object; so often, and then only pass on."""
    return _around(action, times, before=True)


def then(action: Callable[[], object], *, times: int = 1) -> Fault:
    """Do something after the origin has answered and before the client hears of it."""
    return _around(action, times, before=False)


def _around(action: Callable[[], object], times: int, *, before: bool) -> Fault:
    lock, left = threading.Lock(), [times]

    def act() -> None:
        with lock:
            if left[0]:
                left[0] -= 1
                action()

    def fault(exchange: Exchange) -> None:
        if before:
            act()
        answer = exchange.forward()
        if not before:
            act()
        exchange.send(answer)

    return fault


def _begin(exchange: Exchange, after: int) -> bytes:
    """Send the head of the right answer and so many bytes of its body; returns the rest."""
    answer = exchange.forward()
    exchange.send(replace(answer, body=answer.body[:after]), length=len(answer.body))
    return answer.body[after:]
