"""Processes that are started, watched and ended by id, and the scratch folders that own them.

Everything a real part creates belongs to one scratch folder, `/tmp/lpf-<pid>-<n>-<kind>`. Its path is in the
environment of every process started for it (`LPF_SCRATCH`), so daemons that left their process group (Ray's, and
the flow runs of a Prefect worker) are still found, by asking each process, never by guessing from its name.
A folder whose owner is gone is what a SIGKILLed run left: `scratch` removes it, and all that belongs to it, first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real.ports import delete_links, mutex

MARK = "LPF_SCRATCH"
_BASE = Path("/tmp")  # not $TMPDIR: Ray puts AF_UNIX sockets below, and their paths end at 107 characters
_OWNER = "owner.json"
_ABANDONED = 60.0  # seconds after which a folder without an owner was not just being made
_LOOKS = 50
"""So often a process that begins, and shows no environment until it has, is looked for again."""
_numbers = itertools.count()


@contextlib.contextmanager
def scratch(kind: str) -> Iterator[Scratch]:
    """Give a fresh folder and, at the end, remove it with every process, mount and link that belongs to it."""
    with mutex():
        for leftover in _BASE.glob("lpf-*"):
            if _is_stale(leftover):
                _remove(leftover)
        number = next(_numbers)
        area = Scratch(_BASE / f"lpf-{os.getpid()}-{number}-{kind}", f"lp{os.getpid()}-{number}")
        area.path.mkdir()
        area.own()
    try:
        yield area
    finally:
        for running in reversed(area.started):
            running.stop(grace=0)
        with mutex():
            _remove(area.path)


@dataclass(frozen=True)
class Scratch:
    """One scratch folder, and the prefix that the network devices belonging to it are named with."""

    path: Path
    link: str
    started: list[Process] = field(default_factory=list)

    def env(self, *overlays: Mapping[str, str]) -> dict[str, str]:
        """This process's environment with `overlays` on top, marked as belonging to this folder."""
        merged = dict(os.environ)
        for overlay in overlays:
            merged |= overlay
        # Appended, not replaced: a Prefect worker inside a host belongs to the server and to the host.
        merged[MARK] = ":".join(filter(None, [merged.get(MARK), str(self.path)]))
        return merged

    def make_mount_point(self, path: Path) -> None:
        """Make a folder outside of this one to be mounted on; the last scratch folder that uses it removes it."""
        with mutex():
            chain = [p for p in (path, *path.parents) if self.path not in (p, *p.parents)]
            shared = {m for other in _BASE.glob("lpf-*") for m in _owner(other).get("made", [])}
            self.own(made=sorted(str(p) for p in chain if not p.exists() or str(p) in shared))
            path.mkdir(parents=True, exist_ok=True)

    def own(self, made: Sequence[str] = ()) -> None:
        """Record who owns this folder, and folders outside of it that go with it, parents first."""
        pid = os.getpid()
        owner = {"pid": pid, "namespace": _pid_namespace(), "started": _start_time(pid), "made": list(made)}
        (self.path / _OWNER).write_text(json.dumps(owner))


@dataclass(frozen=True)
class Process:
    """A running process in a session of its own, with its output in `log`."""

    name: str
    popen: subprocess.Popen[str]
    log: Path

    @property
    def pid(self) -> int:
        """The id of the process, which is also that of its group."""
        return self.popen.pid

    def tail(self, lines: int = 40) -> str:
        """The end of the log, for error messages."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, grace: float = 10.0) -> None:
        """End the whole group: SIGTERM, then SIGKILL after `grace` seconds. Harmless when it is gone already."""
        end_group(self.popen, grace)


@contextlib.contextmanager
def process(
    argv: Sequence[str | Path],
    *,
    area: Scratch,
    name: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    ready: Callable[[], bool] = lambda: True,
    deadline: float = 60.0,
    grace: float = 10.0,
) -> Iterator[Process]:
    """Run `argv` for the length of the block, which starts when `ready()` holds.

    Raises:
        RuntimeError: it ended, or was not ready within `deadline` seconds; the message shows the log's end.
    """
    running = start(argv, area=area, name=name, env=env, cwd=cwd)
    try:
        wait_until(ready, deadline, f"{name} is ready", watch=running)
        yield running
    finally:
        running.stop(grace)


def start(
    argv: Sequence[str | Path],
    *,
    area: Scratch,
    name: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int = subprocess.DEVNULL,
) -> Process:
    """Start `argv` in its own session, its output going to `<scratch>/<name>.log`, and return at once."""
    log = area.path / f"{name}.log"
    with log.open("a") as out:
        popen = subprocess.Popen(
            [str(a) for a in argv],
            env=area.env(env or {}),
            cwd=cwd,
            stdin=stdin,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
    area.started.append(Process(name, popen, log))
    return area.started[-1]


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    check: bool = True,
    timeout: float | None = 120.0,
    cwd: str | Path | None = None,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run to the end and capture output; on a time-out end the whole group, where `subprocess.run` ends one process.

    Raises:
        RuntimeError: `check` and it failed; the message holds both outputs.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    popen = subprocess.Popen(
        [str(a) for a in argv],
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        out, err = popen.communicate(stdin, timeout=timeout)
    except BaseException:
        end_group(popen, grace=0)
        raise
    if check and popen.returncode != 0:
        command = " ".join(str(a) for a in argv)
        raise RuntimeError(f"exit {popen.returncode} from: {command}\n--- stdout\n{out}\n--- stderr\n{err}")
    return subprocess.CompletedProcess(popen.args, popen.returncode, out, err)


def wait_until(
    condition: Callable[[], bool], deadline: float, what: str, watch: Process | None = None
) -> None:
    """Poll until `condition()` holds.

    Raises:
        RuntimeError: it did not within `deadline` seconds, or the process `watch` ended meanwhile.
    """
    end = time.monotonic() + deadline
    while not condition():
        log = "" if watch is None else f"\n--- end of {watch.log}\n{watch.tail()}"
        if watch is not None and watch.popen.poll() is not None:
            raise RuntimeError(
                f"{watch.name} ended with exit code {watch.popen.returncode}, before {what}{log}"
            )
        if time.monotonic() > end:
            raise RuntimeError(f"after {deadline:g} s it still does not hold that {what}{log}")
        time.sleep(0.05)


def end_group(popen: subprocess.Popen[Any], grace: float) -> None:
    """End a process that leads its own group, and the group with it."""
    if popen.poll() is None and grace > 0:
        _signal_group(popen.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(grace)
    _signal_group(popen.pid, signal.SIGKILL)  # also when the leader is gone: children may not be
    popen.wait()
    for stream in (popen.stdin, popen.stdout, popen.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def kill_marked(mark: Path, variable: str = MARK) -> None:
    """SIGKILL every process that carries `mark` in that variable of its environment, until none is left."""
    end, looks = time.monotonic() + 20, 0
    while looks < _LOOKS:
        pids, unclear = _marked(mark, variable)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pids and time.monotonic() > end:
            raise RuntimeError(f"processes {pids} of {mark} do not die")
        if not pids and not unclear:
            return
        looks = 0 if pids else looks + 1
        time.sleep(0.02)


def _marked(mark: Path, variable: str) -> tuple[list[int], bool]:
    """The processes with that mark, and whether others may have it too: one that begins has no environment yet."""
    found, unclear = [], False
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # ended meanwhile, another user's, or a thread of the kernel
        unclear = unclear or not (environ or state in "ZX")  # a zombie has none either: it is dead enough
        for entry_ in environ.split(b"\0"):
            name, _, value = entry_.partition(b"=")
            if name == variable.encode() and os.fsencode(mark) in value.split(b":"):
                found.append(int(entry.name))
    return found, unclear


def _signal_group(pgid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _owner(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / _OWNER).read_text()))
    except (OSError, ValueError):  # being made, or being removed
        return {}


def _is_stale(folder: Path) -> bool:
    owner = _owner(folder)
    if not owner:
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime > _ABANDONED
        return False
    # Another namespace's process ids say nothing here: tests may run inside of a host. And an id may be given out
    # again, so the start time is what counts.
    if owner["namespace"] != _pid_namespace():
        return False
    return bool(owner["started"] != _start_time(owner["pid"]))


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _start_time(pid: int) -> str | None:
    try:
        # The name in field 2 may hold blanks and brackets: count from behind it. Start time is field 22.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _remove(folder: Path) -> None:
    kill_marked(folder)
    _unmount_below(folder)
    delete_links("-".join(folder.name.replace("lpf-", "lp", 1).split("-")[:2]))
    # Removing a folder detaches what is mounted on it in *other* mount namespaces (since Linux 3.15), so a mount
    # point that another cluster shares stays until that one ends.
    shared = {m for other in _BASE.glob("lpf-*") if other != folder for m in _owner(other).get("made", [])}
    for made in reversed(_owner(folder).get("made", [])):
        if made not in shared:
            with contextlib.suppress(OSError):  # somebody put something there: theirs
                Path(made).rmdir()
    _remove_tree(folder)


def _unmount_below(folder: Path) -> None:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((p for p in points if p.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)


def _remove_tree(folder: Path) -> None:
    # A store's artifacts are read-only folders, which only root may empty as they are.
    for path in (Path(parent, name) for parent, names, _ in os.walk(folder) for name in names):
        if not path.is_symlink() and not os.access(path, os.W_OK | os.X_OK):
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # a dying process may have written once more
        shutil.rmtree(folder)
