"""Lines of the lean reader: connections through the proxies that the environment names, which any thread can cut.

`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` mean what they mean to other programs, in both cases; this
machine itself is never asked through a proxy. A proxy's password shows in no error.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from llm_prefetch.errors import OriginError
from llm_prefetch.origins.tls import TlsConnection


@dataclass(frozen=True, slots=True)
class Line:
    """A connection, opened by the first request on it."""

    connection: http.client.HTTPConnection
    prefix: str = ""
    """What stands before the target of a request: a proxy is told the whole address."""
    headers: Mapping[str, str] | None = None
    """What goes with each request."""
    through: str = ""
    """The proxy, as errors name it."""


class Cutter:
    """Cuts the socket that another thread works on, while it connects, shakes hands, reads or writes."""

    def __init__(self) -> None:
        """Nothing is cut yet."""
        self.reason: str | None = None
        """Why it was cut; `None` when it was not."""
        self._lock = threading.Lock()
        self._handle: socket.socket | None = None

    def cut(self, reason: str) -> None:
        """End what is done on the socket now, and let no other be opened until `mend`."""
        with self._lock:
            self.reason = reason
            if self._handle is not None:
                with contextlib.suppress(OSError):  # it was not connected, or no longer
                    self._handle.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let sockets be opened again."""
        with self._lock:
            self.reason = None

    def release(self) -> None:
        """Forget the socket, which its user closed."""
        with self._lock:
            if self._handle is not None:
                self._handle.close()
            self._handle = None

    def connect(
        self, address: tuple[str, int], timeout: float, _source: tuple[str, int] | None = None
    ) -> socket.socket:
        """Open a socket that can be cut from its first moment on; only the question for the name cannot."""
        failure: OSError | None = None
        for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            made = socket.socket(family, kind, protocol)
            try:
                made.settimeout(timeout)
                self._hold(made)
                made.connect(place)
                self._raise_if_cut()  # a cut socket may look as if it had connected
            except OSError as error:
                made.close()
                failure = error
                if self.reason is not None:
                    break
            else:
                return made
        self.release()
        raise failure or OSError(f"{address[0]} has no address")

    def _hold(self, made: socket.socket) -> None:
        """Keep a second handle: TLS takes the first one over."""
        self.release()
        with self._lock:
            self._handle = made.dup()
        self._raise_if_cut()

    def _raise_if_cut(self) -> None:
        if self.reason is not None:
            raise ConnectionAbortedError(self.reason)


def open_line(url: SplitResult, timeout: float, cutter: Cutter) -> Line:
    """A line to the host of `url`, or to the proxy that leads there.

    Raises:
        OriginError: the environment names a proxy of a kind that is not spoken.
    """
    host = url.hostname or ""
    proxy = _find_proxy(url.scheme, host, url.port)
    to, port = (host, url.port) if proxy is None else (proxy.host, proxy.port)
    tls = url.scheme == "https"
    connection = (TlsConnection if tls else http.client.HTTPConnection)(to, port, timeout=timeout)
    connection._create_connection = cutter.connect  # type: ignore[attr-defined] # noqa: SLF001 (its hook for this)
    if proxy is None:
        return Line(connection)
    through = f"the proxy {proxy.host}:{proxy.port}"
    if tls:
        connection.set_tunnel(host, url.port or http.client.HTTPS_PORT, headers=dict(proxy.headers))
        return Line(connection, through=through)
    return Line(connection, f"http://{url.netloc.rpartition('@')[2]}", proxy.headers, through)


@dataclass(frozen=True, slots=True)
class _Proxy:
    host: str
    port: int
    headers: Mapping[str, str]


def _find_proxy(scheme: str, host: str, port: int | None) -> _Proxy | None:
    from urllib.request import getproxies, proxy_bypass  # only here: it imports half the standard library

    proxies = getproxies()
    address = proxies.get(scheme) or proxies.get("all")
    if not address or _is_loopback(host) or proxy_bypass(f"{host}:{port}" if port else host):
        return None
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        name, number = parts.hostname, parts.port
    except ValueError:  # a port that is no number
        name, number = None, None
    if parts.scheme != "http" or not name:
        raise OriginError(
            "the proxy is not one that is reached by http://",
            where=f"{scheme.upper()}_PROXY",
            hint="name one as http://[user:password@]host:port, or the origin in NO_PROXY",
        )
    headers = {}
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(login).decode()}"
    return _Proxy(name, number or http.client.HTTP_PORT, headers)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
