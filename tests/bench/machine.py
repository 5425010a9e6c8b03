"""What the numbers were measured on; without it they mean nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path


def describe(folder: Path) -> dict[str, str]:
    """Processor, memory, disk below `folder`, kernel and versions."""
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line), "?")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "memory": f"{memory:.0f} GiB",
        "disk": _disk(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": ", ".join(
            f"{name} {_version(name)}" for name in ("llm-prefetch", "blake3", "obstore", "ray")
        ),
        "nginx": _first_line("nginx", "-v"),
        "s5cmd": _first_line("s5cmd", "version"),
    }


def _disk(folder: Path) -> str:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind, *_ = max(inside, key=lambda mount: len(mount[1]))
    return f"{kind} on {device}, {shutil.disk_usage(folder).free / 1e9:.0f} GB free"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _first_line(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "none in PATH"
    return (done.stdout + done.stderr).partition("\n")[0]
