"""Whether an engine may start on what Ray has downloaded.

Ray logs and swallows failures of single files, writes `refs/main` before the first of them, and takes any folder with
a `config.json` for a model. An origin that was published has its manifest in the folder too: then every byte is
compared with it. Without a manifest, what the files say of themselves must hold: every shard that the index names is
there, and is as long as its header says.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llm_prefetch import manifest as manifests
from llm_prefetch.digest import hash_range
from llm_prefetch.errors import FallbackError
from llm_prefetch.manifest import FileEntry, Manifest, parse_manifest

_MODEL_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_MAX_HEADER = 100_000_000
_HINT = "see the replica's log for Ray's reason; publish the model with its manifest, and stage it"


def check_download(
    folder: Path,
    *,
    weights: bool = True,
    indexed: bool = True,
    advance: Callable[[int], None] = lambda _count: None,
) -> str:
    """Pass if the model in `folder` is whole; how that is known.

    Args:
        folder: What Ray gives the engine to load.
        weights: Whether Ray was to bring the weights too; some ways of loading stream them.
        indexed: Whether an index says which shards there are. `save_sharded_state` leaves the index of the model that
            it cut beside the files of each rank.
        advance: Told of bytes that were read.

    Raises:
        FallbackError: it is not; names the first file that is wrong.
        ManifestError: its manifest cannot be read.
    """
    published = folder / manifests.PATH
    if published.is_file():
        manifest = parse_manifest(published.read_bytes(), str(published))
        _compare(folder, manifest, weights=weights, advance=advance)
        return f"its {len(manifest.files)} files are those of the manifest {manifest.version[:15]}"
    _check_shape(folder, weights=weights, indexed=indexed)
    return "the origin has no manifest, so only names and lengths were checked"


def _compare(folder: Path, manifest: Manifest, *, weights: bool, advance: Callable[[int], None]) -> None:
    wanted = [file for file in manifest.files if weights or not file.path.endswith(".safetensors")]
    for file in wanted:
        path = folder / file.path
        if not path.is_file():
            raise _refused(f"{file.path!r} is missing", folder)
        if path.stat().st_size != file.size:
            raise _refused(f"{file.path!r} has {path.stat().st_size} bytes, not {file.size}", folder)
    known = {file.path for file in manifest.files}
    for path in _model_files(folder):
        if path.relative_to(folder).as_posix() not in known:
            raise _refused(f"{path.name!r} does not belong to it, and an engine would load it", folder)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="check-download") as pool:
        chunks = [(file, index) for file in wanted for index in range(len(file.chunks))]
        right = pool.map(lambda chunk: _right(folder, manifest, chunk[0], chunk[1], advance), chunks)
        for (file, _), is_right in zip(chunks, right, strict=True):
            if not is_right:
                pool.shutdown(cancel_futures=True)
                raise _refused(f"{file.path!r} is not what the manifest says", folder)


def _model_files(folder: Path) -> Iterator[Path]:
    """What vLLM would load or run, of which a folder may hold an earlier model's."""
    for below, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(below, name) for name in sorted(names) if name.endswith(_MODEL_FILES))


def _right(
    folder: Path, manifest: Manifest, file: FileEntry, index: int, advance: Callable[[int], None]
) -> bool:
    start = index * manifest.chunk_bytes
    return hash_range(folder / file.path, start, manifest.chunk_bytes, advance) == file.chunks[index]


def _check_shape(folder: Path, *, weights: bool, indexed: bool) -> None:
    if not isinstance(_json(folder / "config.json", folder), dict):
        raise _refused("'config.json' is not a JSON object", folder)
    if not weights:
        return
    found = {path for pattern in _WEIGHTS for path in folder.glob(pattern)}
    for index in sorted(folder.glob("*.index.json") if indexed else ()):
        for shard in _shards(index, folder):
            if folder / shard not in found:
                raise _refused(f"{shard!r}, which {index.name!r} names, is missing", folder)
    if not found:
        raise _refused("it holds no weights", folder)
    for path in sorted(found):
        if path.suffix == ".safetensors":
            _check_length(path, folder)
        elif not path.stat().st_size:
            raise _refused(f"{path.name!r} is empty", folder)


def _shards(index: Path, folder: Path) -> list[str]:
    listed = _json(index, folder)
    shards = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(shards, dict):
        raise _refused(f"{index.name!r} has no weight_map", folder)
    return sorted(set(map(str, shards.values())))


def _check_length(path: Path, folder: Path) -> None:
    """A safetensors file is its header's length, the header, and the tensors at the offsets that it tells."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == len(b"12345678") else _MAX_HEADER
        header = file.read(length) if length < min(size, _MAX_HEADER) else b""
    try:
        tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _refused(f"{path.name!r} has no header of safetensors", folder) from error
    if end != size:
        raise _refused(f"{path.name!r} has {size} bytes, and its header says {end}", folder)


def _json(path: Path, folder: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise _refused(f"{path.name!r} is missing", folder) from error
    except (ValueError, OSError) as error:
        raise _refused(f"{path.name!r} cannot be read", folder) from error


def _refused(reason: str, folder: Path) -> FallbackError:
    return FallbackError(f"what Ray downloaded is not whole: {reason}", where=str(folder), hint=_HINT)
