"""The rung `stage`: this node is made ready by our own staging, in a process of its own; and what follows the rung `ray`.

So neither the libraries of origins nor the work of threads come into the replica's process, and the deadline can end
it. What is committed is there for the next replica, and what is half done for the next staging. Replicas that start
together on one node stage once: the store's lock lets one work, and the others find what it has done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from llm_prefetch.errors import FallbackError, PrefetchError
from llm_prefetch.serve.ladder import Note
from llm_prefetch.serve.waiting import Placed
from llm_prefetch.store import open_store

_log = logging.getLogger("ray.serve.llm_prefetch")
_PROGRAM = [sys.executable, "-m", "llm_prefetch.serve.staging_process"]
_POLL_SECONDS = 0.25
_GRACE_SECONDS = 5.0


async def stage_here(
    spec: dict[str, Any] | str, deployment: str, root: Path | None, note: Note, ready: Callable[[], bool]
) -> str:
    """Stage `spec` on this node; what was done.

    Raises:
        FallbackError: it failed; the reason is that of the staging.
    """
    request = json.dumps({"spec": spec, "deployment": deployment, "root": str(root) if root else None})
    with tempfile.TemporaryFile() as output:
        # Not asyncio's: its processes need a watcher that the loop of a Serve replica may not have.
        process = subprocess.Popen(_PROGRAM, stdin=subprocess.PIPE, stdout=output)  # noqa: ASYNC220
        try:
            _tell(process, request)
            while process.poll() is None:
                note.describe = _describe(root, note)
                if ready():
                    # It is live, and only its bytes are not on the disk for good yet: that need not keep an engine.
                    threading.Thread(target=_see_off, args=[process], name="staging", daemon=True).start()
                    return "staged; its bytes are still being synced"
                await asyncio.sleep(_POLL_SECONDS)
        except BaseException:
            await _end(process)
            raise
        _close(process)
        return _staged(_answer(output, process.returncode))


def commit_later(
    spec: dict[str, Any] | str, deployment: str, root: Path | None, folder: str, origin: str
) -> None:
    """Commit what Ray has downloaded to `folder` from `origin`, for the next replica; nobody waits for it.

    It is proven first, in a process that gives way to all others; what came of it is in the log.
    """
    # Ray's S3 client writes a new file and renames it. Those of other clouds write into the file that is there.
    replaced = origin.startswith("s3://")
    request = {"spec": spec, "deployment": deployment, "root": str(root) if root else None}
    line = json.dumps({**request, "brought": [folder, replaced]})
    arguments = (line, deployment, folder)
    threading.Thread(target=_commit, args=arguments, name="commit", daemon=True).start()


def _commit(request: str, deployment: str, folder: str) -> None:
    try:
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(_PROGRAM, stdin=subprocess.PIPE, stdout=output)
            _tell(process, request)
            _see_off(process)
            said = _taken(_answer(output, process.returncode))
    except (FallbackError, OSError) as error:
        _log.warning("llm-prefetch: %s: what Ray downloaded is not committed: %s", deployment, error)
    else:
        _log.info("llm-prefetch: %s: what Ray downloaded to %s is committed: %s", deployment, folder, said)


def _taken(answer: dict[str, Any]) -> str:
    copied = f", {answer['copied']} copied because {answer['why_copied']}" if answer["copied"] else ""
    return f"{answer['linked']} bytes linked{copied}, {answer['fetched']} fetched"


def _tell(process: subprocess.Popen[bytes], request: str) -> None:
    """Its input stays open: when it ends, the process knows that we have."""
    assert process.stdin is not None  # noqa: S101 (a pipe was asked for)
    try:
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return  # it has ended; its exit code says so


def _describe(root: Path | None, note: Note) -> Callable[[], str]:
    """Bytes and rate, from when there is a store."""
    if isinstance(note.describe, Placed):
        return note.describe
    try:
        return Placed(open_store(root), "staging on this node")
    except PrefetchError:
        return lambda: "staging on this node"


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and do not ask twice; a cancellation meanwhile ends it at once."""
    if process.poll() is None:
        process.terminate()
        try:
            for _ in range(int(_GRACE_SECONDS / _POLL_SECONDS)):
                await asyncio.sleep(_POLL_SECONDS)
                if process.poll() is not None:
                    break
        finally:
            process.kill()
            process.wait()
    _close(process)


def _see_off(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # what it never read
            process.stdin.close()


def _staged(answer: dict[str, Any]) -> str:
    return f"staged: {answer['fetched']} bytes fetched, {answer['reused']} reused, in {answer['seconds']} s"


def _answer(output: IO[bytes], exit_code: int) -> dict[str, Any]:
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        answer = {}
    if exit_code == 0 and "fetched" in answer:
        return answer
    if answer.get("error"):
        raise FallbackError(answer["error"], hint="")  # one line, which says where and what next
    raise FallbackError(
        f"the staging process ended with {exit_code}",
        where="llm_prefetch.serve.staging_process",
        hint="see the replica's standard error",
    )
