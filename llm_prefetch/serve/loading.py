"""What an engine must be told to load a staged folder, beside the folder: each way of loading finds its weights its own way.

Most read them from the folder. Run:ai's streamer reads them from the bucket where the folder holds none, and vLLM
takes that address apart from the model: `model_weights`. What cannot work is refused here, before an engine starts.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llm_prefetch.errors import SpecError

_log = logging.getLogger("ray.serve.llm_prefetch")

SHARDED = ("sharded_state", "runai_streamer_sharded")
"""Formats whose files are one rank's each. An index beside them is that of the model they were made of."""
_STREAMED = {"runai_streamer": ("s3://", "gs://", "az://"), "runai_streamer_sharded": ("s3://",)}
"""The buckets that vLLM 0.29 streams from."""
_READ = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "sharded_state",
)
"""Formats that read the weights from the model's folder and from nowhere else."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
_FORMAT = "engine_kwargs.load_format"


def point_engine(llm_config: Any, ctx: Any, folder: Path, root: Path) -> None:  # noqa: ANN401 (Ray's LLMConfig and context)
    """Make the engine load `folder`, and Ray download nothing but what the folder cannot stand for.

    Args:
        llm_config: Its engine configuration gets the folder in place of what the YAML names.
        ctx: The callback's context.
        folder: The engine path of the model.
        root: The store's root: an extra file of Ray's mirror that a `link:` leads to from there is not fetched.

    Raises:
        SpecError: this folder and these arguments cannot make an engine.
    """
    engine = llm_config.get_engine_config()
    mirror = engine.mirror_config
    source = getattr(mirror, "bucket_uri", None) or engine.hf_model_id
    more = engine_arguments(folder, source, llm_config.engine_kwargs)
    for name, given in _not_staged(llm_config.engine_kwargs):
        _log.warning(
            "llm-prefetch: engine_kwargs.%s: %r is no path on this node, so the engine fetches it; stage it as an "
            "artifact and write %s/live/DEPLOYMENT/ARTIFACT",
            name, given, root,
        )  # fmt: skip
    if more:
        llm_config.update_engine_kwargs(**more)
    extra = [file for file in getattr(mirror, "extra_files", ()) if not _linked(file.destination_path, root)]
    engine.hf_model_id = str(folder)
    engine.mirror_config = (
        mirror.model_copy(update={"bucket_uri": None, "extra_files": extra}) if extra else None
    )
    ctx.run_init_node = ctx.run_init_node and bool(extra)
    if extra:
        _log.warning(
            "llm-prefetch: Ray fetches the extra_files %s; stage them as artifacts with a link: there",
            ", ".join(file.destination_path for file in extra),
        )


def engine_arguments(folder: Path, source: str | None, engine_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """What to add to `engine_kwargs` so that an engine can load `folder`; most often nothing.

    Args:
        folder: The engine path of the model.
        source: Where the weights would come from without us: a bucket, a path or a name of the Hub.
        engine_kwargs: Those of the LLMConfig.

    Raises:
        SpecError: there are no weights where this way of loading looks, or not those of each rank.
    """
    load_format = engine_kwargs.get("load_format") or "auto"
    if load_format not in (*_READ, *_STREAMED) or engine_kwargs.get("model_weights"):
        return {}  # they come from elsewhere: dummy, tensorizer, a loader of a plugin, or as the user says
    # Not as a list: the first file of weights tells.
    names = (name for _, _, files in os.walk(folder) for name in files)
    if load_format in SHARDED:
        ranks = _ranks(names, engine_kwargs)
        if ranks:
            _check_ranks(ranks, engine_kwargs, folder)
            return {}
    elif any(name.endswith(_WEIGHTS[:1] if load_format in _STREAMED else _WEIGHTS) for name in names):
        return {}
    if load_format not in _STREAMED:
        raise SpecError(
            f"{_FORMAT}: {load_format!r} reads the weights from the staged folder, and it holds none",
            where=str(folder),
            hint="stage the weights too (see `exclude` in the spec), or name a format that streams them",
        )
    return {"model_weights": _streamable(source, load_format)}


def _streamable(source: str | None, load_format: str) -> str:
    schemes = _STREAMED[load_format]
    remote = source is not None and "://" in source
    if not source or (
        remote and (not source.startswith(schemes) or "@" in source.partition("://")[2].partition("/")[0])
    ):
        raise SpecError(
            f"{_FORMAT}: {load_format!r} cannot stream the weights from there",
            where=source or "model_loading_config.model_source",
            hint=f"it reads {', '.join(schemes)}; name such a bucket, give engine_kwargs.model_weights, or stage the weights",
        )
    return source


def _ranks(names: Iterable[str], engine_kwargs: Mapping[str, Any]) -> set[int]:
    """The ranks that have files."""
    extra = engine_kwargs.get("model_loader_extra_config")
    pattern = str(extra.get("pattern", _PATTERN) if isinstance(extra, Mapping) else _PATTERN)
    escaped = re.escape(pattern).replace(r"\{rank\}", r"(?P<rank>\d+)", 1).replace(r"\{part\}", ".*")
    found = (re.fullmatch(escaped, name) for name in names)
    return {int(match["rank"]) for match in found if match and "rank" in match.groupdict()}


def _check_ranks(ranks: set[int], engine_kwargs: Mapping[str, Any], folder: Path) -> None:
    wanted = int(engine_kwargs.get("tensor_parallel_size") or 1)
    if ranks != set(range(wanted)):
        raise SpecError(
            f"the files are those of the ranks {', '.join(map(str, sorted(ranks)))}, and "
            f"engine_kwargs.tensor_parallel_size is {wanted}",
            where=str(folder),
            hint="stage what save_sharded_state wrote for this size",
        )


def _not_staged(engine_kwargs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Arguments that name a model or tokenizer of the Hub, which a staged model does not stand for."""
    draft = engine_kwargs.get("speculative_config")
    named = {name: engine_kwargs.get(name) for name in ("tokenizer", "hf_config_path")}
    if isinstance(draft, Mapping):
        named["speculative_config.model"] = draft.get("model")
    return [
        (name, given) for name, given in named.items() if isinstance(given, str) and not Path(given).exists()
    ]


def _linked(destination: str, root: Path) -> bool:
    path = Path(os.path.expandvars(destination)).expanduser()
    return path.is_symlink() and path.exists() and path.readlink().is_relative_to(root / "live")
