"""What the clients fetch: three sets of files of random bytes, made once and kept between runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.bench.origin import FastOrigin
from tests.bench.samples import publish_random

_MIB = 2**20
_CONFIGS = (700, 1_300, 30_000, 2_000_000)
"""What lies beside the weights of a model: configs, a chat template, a tokenizer."""


@dataclass(frozen=True)
class Corpus:
    """Files below one prefix of the origin."""

    name: str
    title: str
    uri: str
    folder: Path
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """All files together, without the manifest."""
        return sum(self.sizes)

    def paths(self) -> list[str]:
        """Every file as the listing names it, the manifest too."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def warm(self) -> None:
        """Read it once, so that no client pays for the origin's disk."""
        for path in self.paths():
            with (self.folder / path).open("rb", buffering=0) as file:
                while file.read(_MIB):
                    pass


def make_corpora(origin: FastOrigin, *, quick: bool) -> dict[str, Corpus]:
    """The three of them by name, in `origin`; a sixteenth of the size when `quick`."""
    part = 16 if quick else 1
    many, big = 2_000 // part, 4_000_000_000 // part
    kinds = {
        "shards": (f"4 x {512 // part} MiB and configs", (512 * _MIB // part,) * 4 + _CONFIGS),
        "many": (f"{many:,} x 64 KiB", (64 * 2**10,) * many),
        "big": (f"one file of {big / 1e9:g} GB", (big,)),
    }
    made = {}
    for name, (title, sizes) in kinds.items():
        prefix = f"{name}quick" if quick else name
        folder = origin.folder(prefix)
        publish_random(folder, sizes)
        made[name] = Corpus(name, title, origin.write_listing(prefix), folder, sizes)
    return made
