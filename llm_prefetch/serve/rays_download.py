"""The rung `ray`: Ray downloads as if we were not there, then our check decides whether the engine may start on it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import FallbackError
from llm_prefetch.serve.downloaded import check_download
from llm_prefetch.serve.ladder import Note
from llm_prefetch.serve.loading import SHARDED
from llm_prefetch.serve.ray_api import node_initialization

if TYPE_CHECKING:
    from llm_prefetch.serve.options import CallbackOptions

_TOKENIZER_ONLY = "TOKENIZER_ONLY"
_ALL = "MODEL_AND_TOKENIZER"


Keep = Callable[[str, str], str]
"""Told of a folder with a whole model and of where Ray has it from; what becomes of it."""


async def download(llm_config: Any, ctx: Any, note: Note, keep: Keep) -> str:  # noqa: ANN401 (Ray's; importing them imports vLLM)
    """Do what Ray would do after this hook, here, where it has a deadline; what came of it.

    A Ray that keeps its node initialisation elsewhere does it itself, and `accept` has the last word. `keep` is as there.

    Raises:
        FallbackError: what it brought is not a whole model.
    """
    if not ctx.run_init_node:
        return "another callback does without Ray's download"
    initialize = node_initialization()
    if initialize is None:
        return "left to Ray"
    note.describe = lambda: "Ray initialises the nodes and downloads what they lack"
    await initialize(llm_config)
    how = await accept(llm_config, ctx, keep, note)
    ctx.run_init_node = False
    return how


async def accept(llm_config: Any, ctx: Any, keep: Keep, note: Note | None = None) -> str:  # noqa: ANN401
    """Pass if the engine may start on what Ray gives it; how that is known, and what `keep` says of it.

    Raises:
        FallbackError: it may not.
        ManifestError: the manifest in what was downloaded cannot be read.
    """
    engine = llm_config.get_engine_config()
    source, what = engine.hf_model_id, getattr(ctx.worker_node_download_model, "name", _ALL)
    mirror = engine.mirror_config
    if getattr(mirror, "bucket_uri", mirror) is None:  # or with extra files alone
        mirror = None
    if mirror is None and not _published(source):
        return f"nothing was to be downloaded: the engine gets {source!r}"
    if source is None or not os.path.isdir(source):  # noqa: ASYNC240, PTH112 (one stat; a model id is no path)
        if what == _ALL:
            raise FallbackError(
                "Ray has downloaded no model",
                where=str(getattr(mirror, "bucket_uri", mirror)),
                hint="see the replica's log for Ray's reason",
            )
        return f"no model was to be downloaded: the engine gets {source!r}"
    if what == _TOKENIZER_ONLY and mirror is not None:
        return f"only the tokenizer was to be downloaded, to {source}"
    began, read = time.monotonic(), [0]

    def advance(count: int) -> None:
        read[0] += count

    if note is not None:
        note.describe = lambda: (
            f"reads what Ray downloaded: {read[0] / 1e9:.1f} GB, "
            f"{read[0] / 1e6 / max(time.monotonic() - began, 1e-9):.0f} MB/s"
        )
    load_format = getattr(engine, "engine_kwargs", {}).get("load_format")
    how = await asyncio.to_thread(
        check_download,
        Path(source),
        weights=(what == _ALL or mirror is None) and load_format != "dummy",
        indexed=load_format not in SHARDED,
        advance=advance,
    )
    if mirror is None:
        return f"nothing was to be downloaded: the engine gets {source!r}, and {how}"
    origin = str(getattr(mirror, "bucket_uri", mirror))
    whole = what == _ALL and load_format != "dummy"
    kept = keep(source, origin) if whole else "it is not committed, as it is no whole model"
    return f"Ray's download to {source} may be used: {how}; {kept}"


def keep(options: CallbackOptions, folder: str, origin: str) -> str:
    """Have it committed for the next replica on this node, if there is a spec that says what it is; nobody waits for it."""
    if options.spec is None:
        return "it is not committed, as no `spec` says what it is; stage it for the next replica"
    from llm_prefetch.serve.staging import commit_later

    commit_later(options.spec, "" if options.by_id else options.live_name, options.root, folder, origin)
    return "it is being committed for the next replica"


def _published(source: str | None) -> bool:
    """Whether it is a folder of the user's own that says what belongs into it."""
    return source is not None and os.path.isfile(os.path.join(source, manifests.PATH))  # noqa: PTH113, PTH118 (may be an id)
