"""One host of a cluster: its processes, its disk, its network, and the Ray node on it.

A host is a set of Linux namespaces. Its disk is bind-mounted over `root`, so the same absolute path holds other files
on every host, as the node store of a cluster does. Its network device hangs on a bridge that has no way out of the
machine. Its processes live under one init process whose death ends them all, which is what `Host.kill` uses, and what
happens when this process dies.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real import processes
from tests.real.ports import delete_links, ip, shape
from tests.real.processes import Process, wait_until
from tests.real.warm import share_model_infos

if TYPE_CHECKING:
    from tests.real.hosts import Cluster

GCS_PORT = 6379
DASHBOARD_PORT = 8265
START_SECONDS = 120.0
"""The longest that any step of a start may take on a busy machine."""
_REPOSITORY = Path(__file__).parents[2]

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
        share_model_infos(self.folder / "home")
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
        self.boot()
        if self.cluster.ray:
            self.cluster.join([self])

    def boot(self) -> None:
        """Let the host run, without Ray."""
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

    def start_ray(self) -> Process:
        """Begin to start its Ray node; the process ends once the node runs."""
        spec, temp = (
            self.spec,
            self.cluster.area.path / "ray" if self.cluster.isolated else self.folder / "ray",
        )
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        argv += [f"--node-ip-address={self.ip}", f"--temp-dir={temp}", f"--node-name={self.name}"]
        argv += [f"--num-cpus={spec.num_cpus}", f"--num-gpus={spec.num_gpus}"]
        argv += [f"--object-store-memory={spec.object_store_mb * 1024 * 1024}"]
        # It passes logs on for drivers to print; the tests read the files.
        argv += ["--include-log-monitor=false"]
        if spec.labels:
            argv += ["--labels", ",".join(f"{key}={value}" for key, value in spec.labels.items())]
        if spec.resources:
            argv += ["--resources", json.dumps(dict(spec.resources))]
        if self is self.cluster.head:
            argv += ["--head", f"--port={GCS_PORT}", f"--dashboard-host={self.ip}"]
            argv += [f"--dashboard-port={DASHBOARD_PORT}", f"--include-dashboard={self.cluster.dashboard}"]
        else:
            argv += [f"--address={self.cluster.address}"]
        return self.popen(argv, name="ray-start")

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
        wait_until(written, START_SECONDS, "its init wrote its process id", watch=self._init)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self._pid())
        ip("link", "set", self.link, "master", area.link, "up")
        assert self._init.popen.stdin is not None
        self._init.popen.stdin.write("\n")
        self._init.popen.stdin.flush()
        wait_until(
            (self.folder / "up").exists, START_SECONDS, "its network and mounts are set", watch=self._init
        )

    def _end(self) -> None:
        if self._init is None:
            return
        self._init.stop(grace=0)
        processes.kill_marked(self.folder, variable="LPF_HOST")
        self._init = None
        if self.cluster.isolated:
            delete_links(self.link)
