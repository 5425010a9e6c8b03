"""What a node says about itself, read from files: importing torch or vLLM takes many seconds, and is not needed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

_SETS = re.compile(r"^(avx|amx|fma|sve|asimd|bf16|vsx|vx)")
_SMI_SECONDS = 10.0


class Node(Protocol):
    """The facts of one node. `ThisNode` is the one that is used; what cannot be told is `None`."""

    def platform(self) -> str | None:
        """What torch was built for: `cuda`, `rocm` or `cpu`."""

    def version(self, package: str) -> str | None:
        """Of an installed package."""

    def cuda(self) -> str | None:
        """Version of the toolkit that torch was built with; empty without one."""

    def python(self) -> str:
        """With its patch level, which torch compares too."""

    def site_packages(self) -> str | None:
        """The folder that holds vLLM."""

    def gpus(self) -> tuple[str, ...]:
        """The name of each."""

    def processor(self) -> tuple[str, ...]:
        """Its instruction sets, as far as kernels use them; sorted."""

    def threads(self) -> int:
        """Processors that this process may use."""

    def key_variables(self) -> frozenset[str]:
        """Names of the environment variables that enter vLLM's key."""


@dataclass(frozen=True, slots=True)
class ThisNode:
    """The node that this process runs on."""

    proc: Path = Path("/proc")
    """Where its kernel tells of it."""

    def platform(self) -> str | None:
        """As `torch/version.py` says."""
        text = _source("torch", "version.py")
        if not text:
            return None
        return "rocm" if _stated(text, "hip") else "cuda" if _stated(text, "cuda") else "cpu"

    def version(self, package: str) -> str | None:
        """By its sources for vLLM and torch, as they go by several names; by its metadata for others."""
        for name, file in (("torch", "version.py"), ("vllm", "_version.py")):
            if package == name:
                return _stated(_source(name, file), "__version__") or None
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def cuda(self) -> str | None:
        """As `torch/version.py` says."""
        text = _source("torch", "version.py")
        return (_stated(text, "hip") or _stated(text, "cuda")) if text else None

    def python(self) -> str:
        """Of this interpreter."""
        return platform.python_version()

    def site_packages(self) -> str | None:
        """Where the import system finds vLLM."""
        folder = _folder("vllm")
        return None if folder is None else str(folder.parent)

    def gpus(self) -> tuple[str, ...]:
        """As the driver tells; in a container, those that it has."""
        return _by_driver(self.proc) or _by_smi()

    def processor(self) -> tuple[str, ...]:
        """As the kernel tells."""
        try:
            text = (self.proc / "cpuinfo").read_text("ascii", errors="replace")
        except OSError:
            return ()
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
        return tuple(sorted(flag for flag in flags[1].split() if _SETS.match(flag))) if flags else ()

    def threads(self) -> int:
        """As the scheduler allows."""
        return len(os.sched_getaffinity(0))

    def key_variables(self) -> frozenset[str]:
        """As vLLM's `envs.py` lists them."""
        return _key_variables()


@lru_cache(maxsize=8)
def _folder(package: str) -> Path | None:
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return Path(found.origin).parent if found is not None and found.origin else None


@lru_cache(maxsize=8)
def _source(package: str, file: str) -> str:
    folder = _folder(package)
    try:
        return (folder / file).read_text("utf-8") if folder else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _stated(text: str, name: str) -> str:
    """The text that a module assigns to `name`."""
    found = re.search(rf"^{name}\b[^='\n]*=[^'\n]*'([^']*)'", text, re.MULTILINE)
    return found[1] if found else ""


def _by_driver(proc: Path) -> tuple[str, ...]:
    names = []
    for path in sorted(proc.glob("driver/nvidia/gpus/*/information")):
        try:
            model = re.search(r"^Model:\s*(.+?)\s*$", path.read_text("ascii", errors="replace"), re.MULTILINE)
        except OSError:
            continue
        names.append(model[1] if model else "")
    return tuple(names)


def _by_smi() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    return (
        tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
        if not done.returncode
        else ()
    )


@lru_cache(maxsize=1)
def _key_variables() -> frozenset[str]:
    """All that `environment_variables` knows but for `ignored_factors`; importing the module would import torch."""
    text = _source("vllm", "envs.py")
    known = set(re.findall(r'^    "([A-Z][A-Z0-9_]+)":', text, re.MULTILINE))
    ignored = re.search(r"ignored_factors[^{]*\{(.*?)^    \}", text, re.DOTALL | re.MULTILINE)
    known -= set(re.findall(r'^\s*"([A-Z][A-Z0-9_]+)",', ignored[1], re.MULTILINE)) if ignored else set()
    return frozenset(known)
