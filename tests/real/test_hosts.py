"""The hosts are real: other disks at one path, links of their own, deaths that Ray notices, and no trace after them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real import processes
from tests.real.hosts import Cluster, HostSpec, hosts
from tests.real.ports import can_isolate, links

needs_root = pytest.mark.usefixtures("isolation")

_ON_EVERY_NODE = """
import json, os, ray, socket
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(log_to_driver=False)

@ray.remote(num_cpus=0)
def look():
    return [socket.gethostname(), open(os.environ["LLM_PREFETCH_ROOT"] + "/who").read()]

pinned = [NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in ray.nodes() if n["Alive"]]
print(json.dumps(sorted(ray.get([look.options(scheduling_strategy=p).remote() for p in pinned]))))
print(json.dumps({n["NodeName"]: n["Labels"].get("disk", "") for n in ray.nodes()}))
"""


def traces(kind: str = "") -> list[str]:
    """What this process's scratch folders of that kind have left: folders, links, mounts, processes."""
    folders = [str(p) for p in Path("/tmp").glob(f"lpf-{os.getpid()}-*{kind}")]
    mounts = [m for m in Path("/proc/self/mountinfo").read_text().splitlines() if f"/lpf-{os.getpid()}-" in m]
    marked = [
        p.name for p in Path("/proc").glob("[0-9]*") if _environ(p).find(b"/tmp/lpf-%d-" % os.getpid()) >= 0
    ]
    return folders + mounts + marked + (links_of(os.getpid()) if can_isolate() else [])


def new_traces(before: list[str]) -> list[str]:
    """What was not there `before`. Clusters of other tests live on, and their processes come and go."""
    others = [trace.encode() for trace in before if trace.startswith("/tmp/lpf-")]

    def foreign(trace: str) -> bool:
        if not trace.isdigit():
            return False
        environ = _environ(Path("/proc", trace))  # empty once it has ended
        return not environ or any(folder in environ for folder in others)

    return [trace for trace in traces() if trace not in before and not foreign(trace)]


def links_of(pid: int) -> list[str]:
    """Network devices of that process's clusters."""
    return links(f"lp{pid}")


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    root = Path("/mnt/lpf-test/store")  # does not exist: made for the hosts, and removed after them
    each = {2: HostSpec(labels={"disk": "nvme"}, disk="tmpfs:8m")}
    before = traces()
    with hosts(n=3, root=root, each=each) as cluster:
        yield cluster
    assert new_traces(before) == []
    assert not root.parent.exists()


@needs_root
@pytest.mark.ray
def test_the_same_path_is_another_disk_on_every_host(cluster: Cluster) -> None:
    for host in cluster.hosts:
        host.run(["sh", "-c", 'hostname > "$LLM_PREFETCH_ROOT/who"'])
    assert {host.root for host in cluster.hosts} == {cluster.root}
    assert [(h.disk / "who").read_text() for h in cluster.hosts] == ["host0\n", "host1\n", "host2\n"]
    assert list(cluster.root.iterdir()) == []  # nothing at that path outside of the hosts

    done = cluster.head.run([sys.executable, "-c", _ON_EVERY_NODE])
    seen, labels = [json.loads(line) for line in done.stdout.splitlines()]
    assert seen == [[f"host{i}", f"host{i}\n"] for i in range(3)]
    assert labels == {"host0": "", "host1": "", "host2": "nvme"}


@needs_root
@pytest.mark.ray
def test_a_small_disk_fills_up(cluster: Cluster) -> None:
    write = ["dd", "if=/dev/zero", "of=big", "bs=1M", "count=16"]
    full = cluster.hosts[2].run(write, cwd=cluster.root, check=False)
    assert full.returncode != 0
    assert "No space left on device" in full.stderr
    assert cluster.head.run(write, cwd=cluster.root).returncode == 0
    for host in (cluster.hosts[2], cluster.head):  # other tests want to write there, too
        (host.disk / "big").unlink()


@needs_root
@pytest.mark.ray
def test_a_killed_host_is_dead_to_ray_and_may_come_back(cluster: Cluster) -> None:
    lost = cluster.hosts[1]
    (lost.disk / "kept").write_text("yes")
    before = cluster.alive()
    assert set(before) == {"host0", "host1", "host2"}
    lost.kill()
    cluster.wait_alive(cluster.hosts[0], cluster.hosts[2])
    with pytest.raises(RuntimeError, match="host1 is down"):
        lost.run(["true"])

    lost.start()
    assert cluster.alive()["host1"] != before["host1"]
    assert lost.run(["cat", "kept"], cwd=cluster.root).stdout == "yes"


@needs_root
def test_links_are_shaped_and_cut() -> None:
    with hosts(n=2, ray=False) as cluster:
        sender, receiver = cluster.hosts
        ping = [sys.executable, "-c", _PING, receiver.ip]
        receiver.popen([sys.executable, "-c", _SINK], name="sink")
        fast = float(sender.run(ping).stdout)
        sender.shape(rate="20mbit")
        slow = float(sender.run(ping).stdout)
        # 2 MB over 20 Mbit/s take 0.8 s, less the burst: a bound from below, which load cannot break.
        assert slow > 0.5
        sender.shape()
        assert float(sender.run(ping).stdout) < slow or fast > 0.5
        receiver.cut()
        assert sender.run(ping, check=False).returncode != 0
        receiver.mend()
        sender.run(ping)


_SINK = """
import socket
server = socket.create_server(("0.0.0.0", 7000))
while True:
    peer, _ = server.accept()
    while peer.recv(65536):
        pass
    peer.sendall(b".")
    peer.close()
"""
_PING = """
import socket, sys, time
for _ in range(50):  # until the sink listens
    try:
        peer = socket.create_connection((sys.argv[1], 7000), timeout=3)
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
started = time.monotonic()
peer.sendall(bytes(2_000_000))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(time.monotonic() - started)
"""


def test_nothing_is_left_after_an_error_half_way() -> None:
    before = traces()
    bad = HostSpec(disk="tmpfs:not-a-size")
    with pytest.raises(RuntimeError, match=r"mount|needs root"), hosts(n=2, ray=False, each={1: bad}):
        pytest.fail("it started")
    with pytest.raises(KeyboardInterrupt):
        _start_a_daemon_and_interrupt()
    assert new_traces(before) == []


@needs_root
def test_two_clusters_share_a_path_and_not_a_network() -> None:
    root = Path("/mnt/lpf-test-two/store")
    with hosts(n=1, root=root, ray=False) as first:
        with hosts(n=1, root=root, ray=False) as second:
            assert first.gateway_ip != second.gateway_ip
            second.head.run(["touch", root / "second"])
        first.head.run(["touch", root / "first"])  # its mount is still there
        assert os.listdir(first.head.disk) == ["first"]  # noqa: PTH208 - a list, not an iterator
    assert not root.parent.exists()


def _start_a_daemon_and_interrupt() -> None:
    with hosts(n=1, ray=False, isolate=False) as cluster:
        # It leaves its session: no process group leads to it, its environment does.
        cluster.head.run(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
        raise KeyboardInterrupt


@needs_root
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    code = (
        "import os, signal\n"
        "from tests.real.hosts import HostSpec, hosts\n"
        "from tests.real.ports import links\n"
        "with hosts(n=1, ray=False, spec=HostSpec(disk='tmpfs:1m')) as cluster:\n"
        "    cluster.head.popen(['sleep', '1000'])\n"
        "    assert cluster.area.path.exists() and links(cluster.area.link)\n"
        "    print(os.getpid(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pid = int(killed.stdout)
    left = f"/tmp/lpf-{pid}-0-hosts"
    with processes.scratch("sweep"):
        assert not Path(left).exists()
        assert links_of(pid) == []
        assert left not in Path("/proc/self/mountinfo").read_text()
        assert not any(left.encode() in _environ(p) for p in Path("/proc").glob("[0-9]*"))


@pytest.mark.ray
def test_without_root_hosts_share_a_network_and_have_a_root_each() -> None:
    with hosts(n=2, isolate=False, dashboard=False) as cluster:
        assert not cluster.isolated
        assert len({host.root for host in cluster.hosts}) == 2
        for host in cluster.hosts:
            host.run(["sh", "-c", f'echo {host.name} > "$LLM_PREFETCH_ROOT/who"'])
        done = cluster.head.run([sys.executable, "-c", _ON_EVERY_NODE])
        seen = json.loads(done.stdout.splitlines()[0])
        assert sorted(who for _, who in seen) == ["host0\n", "host1\n"]
        with pytest.raises(RuntimeError, match="only root can make"):
            cluster.head.shape(rate="1gbit")
