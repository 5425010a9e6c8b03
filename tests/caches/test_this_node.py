"""What a node says about itself: from the files of its kernel, or by the driver's own program."""

from __future__ import annotations

import pytest

from llm_prefetch.caches.this_node import ThisNode
from tests.samples import make_folder

INFORMATION = b"Model: \t\t NVIDIA A10G\nIRQ:   \t\t 43\nGPU UUID: \t GPU-1\n"
CPUINFO = b"processor\t: 0\nflags\t\t: fpu avx2 fma amx_tile sse2\nbugs\t: any\n"


@pytest.fixture
def no_program(tmp_path, monkeypatch):
    """A node without `nvidia-smi`."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def _program(folder, code, output=""):
    path = make_folder(folder, {"nvidia-smi": f"#!/bin/sh\nprintf '{output}'\nexit {code}\n".encode()})
    (path / "nvidia-smi").chmod(0o755)


def test_the_driver_tells_the_gpus_that_a_container_has(tmp_path, no_program):
    gpus = {f"driver/nvidia/gpus/0000:00:{n}.0/information": INFORMATION for n in ("1e", "1f")}
    assert ThisNode(make_folder(tmp_path / "proc", gpus)).gpus() == ("NVIDIA A10G", "NVIDIA A10G")


def test_where_the_kernel_does_not_its_program_does(tmp_path, no_program):
    _program(tmp_path / "bin", 0, "NVIDIA A10G\\nNVIDIA H100 80GB HBM3\\n")
    assert ThisNode(tmp_path / "proc").gpus() == ("NVIDIA A10G", "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("code", [0, 9])
def test_a_node_without_either_or_with_a_driver_that_fails_has_none(tmp_path, no_program, code):
    if code:
        _program(tmp_path / "bin", code, "NVIDIA-SMI has failed")
    assert ThisNode(tmp_path / "proc").gpus() == ()


def test_of_a_processor_only_what_kernels_are_compiled_for_counts(tmp_path):
    assert ThisNode(make_folder(tmp_path, {"cpuinfo": CPUINFO})).processor() == ("amx_tile", "avx2", "fma")
    assert ThisNode(tmp_path / "gone").processor() == ()


def test_a_package_that_is_not_installed_has_no_version():
    assert ThisNode().version("no-such-package") is None
