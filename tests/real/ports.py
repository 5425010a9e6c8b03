"""Free ports and subnets, bridges and links, and the lock under which runs in parallel choose them."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

_SUBNETS = ipaddress.IPv4Network("10.231.0.0/16")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that was free just now. Prefer port 0 where a server can say which it got."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def listens(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def mutex(deadline: float = 60.0) -> Iterator[None]:
    """Be the only run on this machine that sets up or tears down; wait up to `deadline` seconds for that.

    An abstract socket, not a lock file: it exists once per network namespace, as bridges and subnets do, it leaves
    no file, and the kernel frees it when its holder dies.
    """
    end = time.monotonic() + deadline
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind("\0llm-prefetch-tests")
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise RuntimeError("another test run has been setting up hosts for too long") from error
                time.sleep(0.02)
        yield


def bridge(name: str) -> ipaddress.IPv4Network:
    """Make a bridge and return its subnet; .1 is its address on this side.

    Raises:
        RuntimeError: `ip` refused, or no subnet is free.
    """
    with mutex():
        subnet = _free_subnet()
        ip("link", "add", name, "type", "bridge")
        ip("address", "add", f"{subnet[1]}/24", "broadcast", "+", "dev", name)
        ip("link", "set", name, "up")
    return subnet


def _free_subnet() -> ipaddress.IPv4Network:
    taken = []
    for route in json.loads(ip("-json", "route", "show", "table", "all") or "[]"):
        with contextlib.suppress(ValueError):  # "default", and IPv6
            taken.append(ipaddress.IPv4Network(route["dst"]))
    for subnet in _SUBNETS.subnets(new_prefix=24):
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise RuntimeError(f"no free subnet in {_SUBNETS}")


def free_loopback(port: int) -> ipaddress.IPv4Network:
    """A /24 of 127.0.0.0/8, where any user may bind, with nothing on `port` of .11, its first host."""
    for subnet in ipaddress.IPv4Network("127.231.0.0/16").subnets(new_prefix=24):
        if not listens(str(subnet[11]), port):
            return subnet
    raise RuntimeError("no free loopback subnet")


def ip(*args: str) -> str:
    """Run iproute2's `ip` and return what it prints.

    Raises:
        RuntimeError: it failed; the message is its own.
    """
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def delete_links(prefix: str) -> None:
    """Delete the network devices called `prefix`, or `prefix-...`. Harmless when there are none."""
    if shutil.which("ip") is None:
        return
    for name in links(prefix):
        with contextlib.suppress(RuntimeError):  # a veth goes with its peer, or with its namespace
            ip("link", "delete", name)


def links(prefix: str) -> list[str]:
    """The names of network devices called `prefix`, or `prefix-...`."""
    names = [str(link["ifname"]) for link in json.loads(ip("-json", "link", "show") or "[]")]
    return [name for name in names if name == prefix or name.startswith(f"{prefix}-")]


def shape(enter: list[str], device: str, rate: str | None, delay: str | None) -> None:
    """Limit what leaves by `device`, seen from the namespace that the command `enter` enters; None lifts a limit.

    Raises:
        RuntimeError: tc refused; a delay needs the kernel's `sch_netem`, which not every kernel has.
    """
    if delay:
        discipline = ["netem", "delay", delay, *(["rate", rate] if rate else [])]
    elif rate:
        # The burst must hold whole offloaded segments (64 KB); the queue is what 50 ms fill.
        discipline = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    else:
        discipline = ["pfifo_fast"]
    argv = [*enter, "tc", "qdisc", "replace", "dev", device, "root", *discipline]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


@functools.cache
def can_isolate() -> bool:
    """Whether this process may make namespaces and bridges: it is root, not confined, and has the tools."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("ip", "tc", "unshare", "nsenter")):
        return False
    probe = "mount -t tmpfs tmpfs /tmp && ip link add probe type bridge"
    argv = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "sh", "-c", probe]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0
