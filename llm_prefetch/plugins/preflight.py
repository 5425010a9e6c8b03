"""Try plugins before any replica needs them, in a subprocess that can do no harm to this one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_prefetch.errors import PluginError
from llm_prefetch.plugins.names import Plugin
from llm_prefetch.plugins.vllm_entry import VARIABLE
from llm_prefetch.stop import Stop

PASSED = "passed"
NO_VLLM = "not preflighted: no vllm here"
_SECONDS = 300.0
_TOLD_LINES = 3
_LOOK_SECONDS = 0.2


def preflight(
    plugins: Sequence[Plugin],
    folders: Mapping[str, Path],
    *,
    tokenizer: Path | None = None,
    seconds: float = _SECONDS,
    stop: Stop | None = None,
) -> str:
    """Import each plugin and exercise it on a sample output.

    Args:
        plugins: Built-in ones are left out.
        folders: Where the files of the artifacts lie.
        tokenizer: The model's folder; a parser is tried with its tokenizer. Without it, with one that knows any token.
        seconds: When to give up.
        stop: Ends the trial when it is set.

    Returns:
        `PASSED`, or `NO_VLLM` where vLLM is not installed and nothing was tried.

    Raises:
        PluginError: one of them is broken.
        OriginUnavailableError: `stop` is set.
    """
    tried = [plugin for plugin in plugins if plugin.module]
    if importlib.util.find_spec("vllm") is None:
        return NO_VLLM
    if tried:
        flaws = _run(tried, folders, tokenizer, seconds, stop or Stop())
        if flaws:
            more = f" (and {len(flaws) - 1} more)" if len(flaws) > 1 else ""
            raise PluginError(
                f"{flaws[0]['where']}: {flaws[0]['target']} is broken: {flaws[0]['reason']}{more}",
                where="preflight",
                hint="mend it and publish the artifact again; nothing was switched to this version",
            )
    return PASSED


def _run(
    plugins: Sequence[Plugin], folders: Mapping[str, Path], tokenizer: Path | None, seconds: float, stop: Stop
) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="llm-prefetch-preflight-") as name:
        request, result, log = (Path(name) / file for file in ("request", "result", "log"))
        body: dict[str, Any] = {
            "plugins": [asdict(plugin) for plugin in plugins],
            "folders": {artifact: str(folder.resolve()) for artifact, folder in folders.items()},
            "tokenizer": str(tokenizer.resolve()) if tokenizer else None,
        }
        request.write_text(json.dumps(body), "utf-8")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "llm_prefetch.plugins.trial", str(request), str(result)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=_environment(), cwd=name, start_new_session=True,
            )  # fmt: skip
        try:
            code = _wait(process, seconds, stop)
        finally:
            _end(process)
        if result.is_file():
            flaws: list[dict[str, str]] = json.loads(result.read_text("utf-8"))
            return flaws
        raise _no_answer(plugins, code, seconds, log.read_text("utf-8", errors="replace"))


def _wait(process: subprocess.Popen[bytes], seconds: float, stop: Stop) -> int | None:
    """The exit code, or nothing when the time is up."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_SECONDS)
        stop.raise_if_set()
    return None


def _environment() -> dict[str, str]:
    """Ours, without what a plugin has no business with while it is tried: GPUs, other plugins, the hub."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever the plugins started ends with them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _no_answer(plugins: Sequence[Plugin], code: int | None, seconds: float, log: str) -> PluginError:
    how = f"did not end within {seconds:.0f} s" if code is None else f"ended with {code}"
    said = " / ".join(line.strip() for line in log.splitlines()[-_TOLD_LINES:] if line.strip())
    return PluginError(
        f"the trial of {', '.join(plugin.target for plugin in plugins)} {how}: {said or 'it said nothing'}",
        where="preflight",
        hint="import them by hand on this node; nothing was switched to this version",
    )
