"""What is staged: files of random bytes, a manifest beside them, and sparse files of any size."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from llm_prefetch import manifest as manifests
from llm_prefetch.digest import hash_range
from llm_prefetch.manifest import CHUNK_BYTES, FileEntry, Manifest, chunk_count

_BLOCK = 16 * 2**20


def publish_random(folder: Path, sizes: Sequence[int]) -> Manifest:
    """Files of `sizes` bytes with a manifest beside them; what is there from an earlier run is kept."""
    path = folder / manifests.PATH
    if path.exists():
        found = manifests.parse_manifest(path.read_bytes(), str(path))
        if [file.size for file in found.files] == list(sizes):
            return found
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        write_random(folder / f"model-{number:05d}.safetensors", size)
    return seal(folder)


def write_random(path: Path, size: int) -> None:
    """A file in which no two chunks are equal."""
    block = bytearray(os.urandom(min(_BLOCK, size)))
    with path.open("wb") as file:
        for at in range(0, size, _BLOCK):
            block[:32] = os.urandom(32)
            file.write(block[: size - at])


def seal(folder: Path) -> Manifest:
    """Write the manifest of the files in `folder`."""
    entries = []
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        size = file.stat().st_size
        digests = [hash_range(file, at, CHUNK_BYTES) for at in range(0, size, CHUNK_BYTES)]
        entries.append(FileEntry(file.name, size, tuple(digests)))
    manifest = Manifest(tuple(entries))
    path = folder / manifests.PATH
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(manifest.to_json())
    return manifest


def sparse_manifest(files: int, total_bytes: int) -> Manifest:
    """A manifest of `files` files with digests of nothing, for what never reads content."""
    size, rng = total_bytes // files, random.Random(1)
    return Manifest(
        tuple(
            FileEntry(
                f"shards/{number:03d}/model-{number:05d}.safetensors"
                if number % 3
                else f"model-{number:05d}",
                size,
                tuple(rng.randbytes(32).hex() for _ in range(chunk_count(size))),
            )
            for number in sorted(range(files), key=lambda n: f"shards/{n:03d}" if n % 3 else f"model-{n:05d}")
        )
    )


def lay_out(base: Path, manifest: Manifest) -> None:
    """The files of a manifest, as holes."""
    for file in manifest.files:
        path = base / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as handle:
            handle.truncate(file.size)
