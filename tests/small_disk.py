"""A file system that is soon full, without being root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_on_small_disk(disk: Path, script: str, *arguments: str, size: str) -> str:
    """Run `script` where `disk` is a file system of `size` that ends with the process; returns what it printed."""
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    )
    mount = f'mount -t tmpfs -o size={size} tmpfs {disk} && exec {sys.executable} -c "$SCRIPT" "$@"'
    done = subprocess.run(
        [*unshare, "sh", "-c", mount, "sh", *arguments],
        env={**os.environ, "SCRIPT": script},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
