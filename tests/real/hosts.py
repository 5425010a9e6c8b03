"""Several real hosts on one machine: each with its own network, disk, processes and name, and a Ray node.

A host is a set of Linux namespaces. Its disk is bind-mounted over `root`, so the same absolute path holds other files
on every host, as the node store of a cluster does. Its network device hangs on a bridge that has no way out of the
machine; servers in the root namespace are reached at `cluster.gateway_ip`. Its processes live under one init process
whose death ends them all, which is what `Host.kill` uses, and what happens when this process dies.

Without root there are no namespaces to be had: then hosts are raylets on loopback addresses, `cluster.isolated` is
false, every host has another `root`, and `Host.shape`, `Host.cut` and small disks raise `RuntimeError`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.real import processes
from tests.real.ports import bridge, can_isolate, delete_links, free_loopback, ip, listens, shape
from tests.real.processes import Process, Scratch, wait_until

_REPOSITORY = Path(__file__).parents[2]
_GCS_PORT = 6379
_DASHBOARD_PORT = 8265
_START = 120.0  # seconds: the longest that any step of a start may take on a busy machine

_RAY_ENV = {
    "RAY_AUTH_MODE": "disabled",  # a token in the home of whoever runs the tests would turn it on
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the announced default; unset, every worker warns
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill workers for the memory that *others* use here
    "RAY_enable_worker_prestart": "0",  # idle workers of three hosts cost more than the start of the one needed
    "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",  # of the defaults, which take half a minute to call a host dead
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}

_NODES = "import json, ray; ray.init(log_to_driver=False); print(json.dumps(ray.nodes()))"

# The first process of a host. Each line of standard input is one step; its end means that our process is gone.
_INIT = """
set -e
read -r pid _ < /proc/self/stat; echo "$pid" > "$1/pid"
read -r _
mount -t proc proc /proc
mount -t tmpfs -o size=4g tmpfs /dev/shm
for pair in "${@:4}"; do mount --bind "${pair%%=*}" "${pair#*=}"; done
hostname "$2"
ip link set lo up
ip address add "$3" broadcast + dev eth0
ip link set eth0 up
touch "$1/up"
while read -r _; do :; done
"""


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
            cluster._start_ray(cluster.hosts)
        yield cluster
        # No orderly shutdown: `scratch` kills what is left, which takes a tenth of the time of `ray stop`.


@dataclass(frozen=True)
class HostSpec:
    """What one host has."""

    num_cpus: int = 2
    num_gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    object_store_mb: int = 100
    disk: str = "dir"
    """`dir`, or `tmpfs:SIZE` (`tmpfs:64m`) for a disk that can be filled."""


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
            self._subnet = free_loopback(_GCS_PORT)

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
        return f"{self.head.ip}:{_GCS_PORT}"

    @property
    def dashboard_url(self) -> str:
        """Ray's dashboard and REST API, reachable from here as well as from the hosts."""
        return f"http://{self.head.ip}:{_DASHBOARD_PORT}"

    def add_host(self, spec: HostSpec | None = None) -> Host:
        """Start one more host and let its Ray node join."""
        host = self._boot(spec or HostSpec())
        if self.ray:
            self._start_ray([host])
        return host

    def alive(self) -> dict[str, str]:
        """The hosts whose node Ray takes to be alive: name to Ray node id."""
        names = {host.ip: host.name for host in self.hosts}
        if not self.dashboard:
            nodes = json.loads(self.head.run([sys.executable, "-c", _NODES]).stdout.splitlines()[-1])
            return {names[n["NodeManagerAddress"]]: n["NodeID"] for n in nodes if n["Alive"]}
        with urllib.request.urlopen(f"{self.dashboard_url}/nodes?view=summary", timeout=30) as answer:
            raylets = [node["raylet"] for node in json.load(answer)["data"]["summary"]]
        return {names[r["nodeManagerAddress"]]: r["nodeId"] for r in raylets if r.get("state") == "ALIVE"}

    def wait_alive(self, *expected: Host, deadline: float = _START) -> None:
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
        host._boot()
        return host

    def _start_ray(self, joining: Sequence[Host]) -> None:
        starts = []
        for host in joining:
            starts.append(host._ray_start())
            if host is self.head:
                # The others need no more than the GCS; the head's dashboard comes up beside them.
                gcs_answers = functools.partial(listens, host.ip, _GCS_PORT)
                wait_until(gcs_answers, _START, "Ray's GCS accepts connections", watch=starts[0])
        for start in starts:
            wait_until(functools.partial(_has_ended, start), _START, f"{start.name} returned")
            if start.popen.returncode != 0:
                raise RuntimeError(f"{start.name} failed\n--- end of {start.log}\n{start.tail()}")
        self.wait_alive()


class Host:
    """One host. `root` is the path of its disk as its processes see it, `disk` as this process does."""

    def __init__(self, cluster: Cluster, index: int, spec: HostSpec, address: str) -> None:
        self.cluster = cluster
        self.name = f"host{index}"
        self.ip = address
        self.spec = spec
        self.folder = cluster.area.path / self.name
        self.disk = self.folder / "disk"
        self.root = cluster.root if cluster.isolated else self.disk
        self.link = f"{cluster.area.link}-{index}"
        self._init: Process | None = None
        for folder in ("disk", "ray", "home"):
            (self.folder / folder).mkdir(parents=True)
        (self.folder / "machine-id").write_text(f"{os.getpid():016x}{index:016x}\n")

    @property
    def running(self) -> bool:
        """Whether the host is up, as far as we know: started, and neither killed nor stopped."""
        return self._init is not None

    def env(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of this host's processes, with `env` on top."""
        own = _RAY_ENV | {
            "HOME": str(self.cluster.area.path / "home" if self.cluster.isolated else self.folder / "home"),
            "LLM_PREFETCH_ROOT": str(self.root),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")])),
            "RAY_ADDRESS": self.cluster.address,
            "RAY_DASHBOARD_ADDRESS": self.cluster.dashboard_url,
        }
        return self.cluster.area.env(own, self.cluster.env, {"LPF_HOST": str(self.folder)}, env or {})

    def run(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float | None = 120.0,
        cwd: str | Path = _REPOSITORY,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and capture its output.

        Raises:
            RuntimeError: `check` and it failed; the message holds both outputs.
            subprocess.TimeoutExpired: it took longer than `timeout` seconds.
        """
        command = [*self._enter(), "env", "-C", cwd, *argv]
        return processes.run(command, env=self.env(env), check=check, timeout=timeout, stdin=stdin)

    def popen(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: str | Path = _REPOSITORY,
        name: str = "popen",
    ) -> Process:
        """Start a command on this host. It ends with the host at the latest; `Process.stop` ends it before."""
        command = [*self._enter(), "env", "-C", cwd, *argv]
        return processes.start(command, area=self.cluster.area, name=f"{self.name}-{name}", env=self.env(env))

    def kill(self) -> None:
        """Pull the plug: the network goes first, so that peers see silence and no closed connection."""
        if self.cluster.isolated:
            delete_links(self.link)
        self._end()

    def stop(self) -> None:
        """Let Ray leave in an orderly way, then end the host. Its disk stays."""
        if (
            self.cluster.ray and self.cluster.isolated
        ):  # without a /proc of its own it would stop other people's Ray
            self.run([sys.executable, "-m", "ray.scripts.scripts", "stop"], check=False)
        self._end()

    def start(self) -> None:
        """Start the host again after `kill` or `stop`, with its disk as it was and a new Ray node id.

        Not for the head: Ray's GCS keeps its tables in memory, so the cluster ends with it.
        """
        if self.cluster.ray:
            self.cluster.wait_alive()  # until Ray has noticed the death, two nodes would have this address
        shutil.rmtree(self.folder / "ray")
        (self.folder / "ray").mkdir()
        self._boot()
        if self.cluster.ray:
            self.cluster._start_ray([self])

    def shape(self, rate: str | None = None, delay: str | None = None) -> None:
        """Limit what the host sends and what it receives, each to `rate` (tc's words: `1gbit`), and delay both.

        Neither argument lifts the limits. A delay needs the kernel's `sch_netem`.

        Raises:
            RuntimeError: tc refused, or hosts are not isolated.
        """
        shape(self._netns(), "eth0", rate, delay)
        shape([], self.link, rate, delay)

    def cut(self) -> None:
        """Unplug the network cable; the host runs on."""
        self._netns()
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        ip("link", "set", self.link, "up")

    def _netns(self) -> list[str]:
        if not self.cluster.isolated:
            raise RuntimeError("this needs hosts with networks of their own, which only root can make")
        return ["nsenter", "--target", self._pid(), "--net", "--"]

    def _enter(self) -> list[str]:
        if not self.running:
            raise RuntimeError(f"{self.name} is down")
        if not self.cluster.isolated:
            return []
        return ["nsenter", "--target", self._pid(), "--mount", "--net", "--pid", "--uts", "--ipc", "--"]

    def _pid(self) -> str:
        return (self.folder / "pid").read_text().strip()

    def _boot(self) -> None:
        kind, _, size = self.spec.disk.partition(":")
        if kind == "tmpfs" and not os.path.ismount(self.disk):
            if not self.cluster.isolated:
                raise RuntimeError("a disk of limited size needs root")
            # Mounted here, outside of the host, so that the disk outlives it and can be read from here.
            processes.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.disk], env=os.environ)
        for stale in ("pid", "up"):
            (self.folder / stale).unlink(missing_ok=True)
        area = self.cluster.area
        if self.cluster.isolated:
            self._boot_isolated()
        else:
            argv = ["sh", "-c", "while read -r _; do :; done"]
            self._init = processes.start(argv, area=area, name=self.name, stdin=subprocess.PIPE)

    def _boot_isolated(self) -> None:
        area = self.cluster.area
        binds = {
            self.disk: self.root,
            self.folder / "ray": area.path / "ray",
            self.folder / "home": area.path / "home",
            self.folder / "machine-id": Path("/etc/machine-id"),
            area.path / "etc-hosts": Path("/etc/hosts"),
        }
        pairs = [f"{source}={target}" for source, target in binds.items() if target.exists()]
        unshare = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        init = ["bash", "-c", _INIT, "init", str(self.folder), self.name, f"{self.ip}/24", *pairs]
        self._init = processes.start([*unshare, *init], area=area, name=self.name, stdin=subprocess.PIPE)
        pid_file = self.folder / "pid"
        written = lambda: pid_file.exists() and pid_file.read_text().endswith("\n")  # noqa: E731
        wait_until(written, _START, "its init wrote its process id", watch=self._init)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self._pid())
        ip("link", "set", self.link, "master", area.link, "up")
        assert self._init.popen.stdin is not None
        self._init.popen.stdin.write("\n")
        self._init.popen.stdin.flush()
        wait_until((self.folder / "up").exists, _START, "its network and mounts are set", watch=self._init)

    def _ray_start(self) -> Process:
        spec, temp = (
            self.spec,
            self.cluster.area.path / "ray" if self.cluster.isolated else self.folder / "ray",
        )
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        argv += [f"--node-ip-address={self.ip}", f"--temp-dir={temp}", f"--node-name={self.name}"]
        argv += [f"--num-cpus={spec.num_cpus}", f"--num-gpus={spec.num_gpus}"]
        argv += [f"--object-store-memory={spec.object_store_mb * 1024 * 1024}"]
        if spec.labels:
            argv += ["--labels", ",".join(f"{key}={value}" for key, value in spec.labels.items())]
        if spec.resources:
            argv += ["--resources", json.dumps(dict(spec.resources))]
        if self is self.cluster.head:
            argv += ["--head", f"--port={_GCS_PORT}", f"--dashboard-host={self.ip}"]
            argv += [f"--dashboard-port={_DASHBOARD_PORT}", f"--include-dashboard={self.cluster.dashboard}"]
        else:
            argv += [f"--address={self.cluster.address}"]
        return self.popen(argv, name="ray-start")

    def _end(self) -> None:
        if self._init is None:
            return
        self._init.stop(grace=0)
        processes.kill_marked(self.folder, variable="LPF_HOST")
        self._init = None
        if self.cluster.isolated:
            delete_links(self.link)


def _has_ended(process: Process) -> bool:
    return process.popen.poll() is not None
