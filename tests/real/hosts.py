"""Several real hosts on one machine: each with its own network, disk, processes and name, and a Ray node.

Servers in the root namespace are reached from every host at `cluster.gateway_ip`; `host` tells what a host is.

Without root there are no namespaces to be had: then hosts are raylets on loopback addresses, `cluster.isolated` is
false, every host has another `root`, and `Host.shape`, `Host.cut` and small disks raise `RuntimeError`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.real import processes
from tests.real.host import DASHBOARD_PORT, GCS_PORT, START_SECONDS, Host, HostSpec
from tests.real.ports import bridge, can_isolate, free_loopback, listens
from tests.real.processes import Process, Scratch, wait_until

_NODES = "import json, ray; ray.init(log_to_driver=False); print(json.dumps(ray.nodes()))"


@contextlib.contextmanager
def hosts(
    n: int = 3,
    root: str | Path | None = None,
    *,
    spec: HostSpec | None = None,
    each: Mapping[int, HostSpec] | None = None,
    ray: bool = True,
    dashboard: bool = True,
    isolate: bool | None = None,
    env: Mapping[str, str] | Callable[[str], Mapping[str, str]] | None = None,
) -> Iterator[Cluster]:
    """Start `n` hosts that form one Ray cluster; the first is the head.

    Args:
        n: how many.
        root: the absolute path at which every host sees its own disk; by default one below the scratch folder.
        spec: what every host has.
        each: what single hosts have instead, by index.
        ray: false starts the hosts alone, which takes a tenth of a second each.
        dashboard: Serve's REST API, Ray Jobs and the state API need it; without, the start takes half the time.
        isolate: true insists on namespaces, false does without; by default, they are used where they can be had.
        env: for every process on every host, Ray's workers among them; or what makes it, given `gateway_ip`, once
            servers can listen there and before a host starts.

    Raises:
        RuntimeError: a host or its Ray node did not come up; the message shows its log.
    """
    with processes.scratch("hosts") as area:
        isolated = can_isolate() if isolate is None else isolate
        path = Path(root) if root else area.path / "root"
        cluster = Cluster(area, path, isolated=isolated, ray=ray, dashboard=dashboard)
        cluster.env.update(env(cluster.gateway_ip) if callable(env) else env or {})
        for index in range(n):
            cluster._boot((each or {}).get(index) or spec or HostSpec())
        if ray:
            cluster.join(cluster.hosts)
        yield cluster
        # No orderly shutdown: `scratch` kills what is left, which takes a tenth of the time of `ray stop`.


class Cluster:
    """The hosts of one `hosts` block."""

    def __init__(self, area: Scratch, root: Path, *, isolated: bool, ray: bool, dashboard: bool) -> None:
        self.hosts: list[Host] = []
        self.area = area
        self.root = root
        self.isolated = isolated
        self.ray = ray
        self.dashboard = dashboard
        self.env: dict[str, str] = {}
        (area.path / "etc-hosts").write_text("127.0.0.1 localhost\n")
        if self.isolated:
            for name in ("ray", "home"):
                (area.path / name).mkdir()
            area.make_mount_point(root)
            self._subnet = bridge(area.link)
        else:
            self._subnet = free_loopback(GCS_PORT)

    @property
    def gateway_ip(self) -> str:
        """The address of the root namespace: bind servers here, and every host reaches them."""
        return str(self._subnet[1]) if self.isolated else "127.0.0.1"

    @property
    def head(self) -> Host:
        """The host whose Ray node is the head."""
        return self.hosts[0]

    @property
    def address(self) -> str:
        """Ray's GCS as `ip:port`, for `RAY_ADDRESS`. A driver must run on a host: see `Host.run`."""
        return f"{self.head.ip}:{GCS_PORT}"

    @property
    def dashboard_url(self) -> str:
        """Ray's dashboard and REST API, reachable from here as well as from the hosts."""
        return f"http://{self.head.ip}:{DASHBOARD_PORT}"

    def add_host(self, spec: HostSpec | None = None) -> Host:
        """Start one more host and let its Ray node join."""
        host = self._boot(spec or HostSpec())
        if self.ray:
            self.join([host])
        return host

    def join(self, joining: Sequence[Host]) -> None:
        """Start Ray on these hosts, which run, and wait until it sees them alive.

        Raises:
            RuntimeError: a Ray node did not come up; the message shows its log.
        """
        starts = []
        for host in joining:
            starts.append(host.start_ray())
            if host is self.head:
                # The others need no more than the GCS; the head's dashboard comes up beside them.
                gcs_answers = functools.partial(listens, host.ip, GCS_PORT)
                wait_until(gcs_answers, START_SECONDS, "Ray's GCS accepts connections", watch=starts[0])
        for start in starts:
            wait_until(functools.partial(_has_ended, start), START_SECONDS, f"{start.name} returned")
            if start.popen.returncode != 0:
                raise RuntimeError(f"{start.name} failed\n--- end of {start.log}\n{start.tail()}")
        self.wait_alive()

    def alive(self) -> dict[str, str]:
        """The hosts whose node Ray takes to be alive: name to Ray node id."""
        names = {host.ip: host.name for host in self.hosts}
        if not self.dashboard:
            nodes = json.loads(self.head.run([sys.executable, "-c", _NODES]).stdout.splitlines()[-1])
            return {names[n["NodeManagerAddress"]]: n["NodeID"] for n in nodes if n["Alive"]}
        with urllib.request.urlopen(f"{self.dashboard_url}/nodes?view=summary", timeout=30) as answer:
            raylets = [node["raylet"] for node in json.load(answer)["data"]["summary"]]
        return {names[r["nodeManagerAddress"]]: r["nodeId"] for r in raylets if r.get("state") == "ALIVE"}

    def wait_alive(self, *expected: Host, deadline: float = START_SECONDS) -> None:
        """Wait until exactly these hosts (by default: all that run) are alive to Ray.

        Raises:
            RuntimeError: that took longer than `deadline` seconds.
        """
        names = {host.name for host in expected or self.hosts if host.running}
        wait_until(
            lambda: self._alive_or_none() == names, deadline, f"Ray sees exactly {sorted(names)} alive"
        )

    def _alive_or_none(self) -> set[str] | None:
        try:
            return set(self.alive())
        except OSError:  # the dashboard answers some time after `ray start` has returned
            return None

    def _boot(self, spec: HostSpec) -> Host:
        index = len(self.hosts)
        host = Host(self, index, spec, str(self._subnet[11 + index]))
        self.hosts.append(host)
        with (self.area.path / "etc-hosts").open("a") as names:
            names.write(f"{host.ip} {host.name}\n")  # in place: it is mounted over every host's /etc/hosts
        host.boot()
        return host


def _has_ended(process: Process) -> bool:
    return process.popen.poll() is not None
