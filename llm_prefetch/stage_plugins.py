"""Artifacts of kind `plugin` in a staging: trusted before a byte is fetched, tried before anything is switched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llm_prefetch.errors import PrefetchError, TrustError
from llm_prefetch.manifest import Manifest
from llm_prefetch.plugins.preflight import NO_VLLM, preflight
from llm_prefetch.progress import Progress
from llm_prefetch.redact import redact
from llm_prefetch.resolve import resolve
from llm_prefetch.signatures import require_signature
from llm_prefetch.spec import Artifact
from llm_prefetch.stop import Stop
from llm_prefetch.store import NodeStore


def check_pinned(artifact: Artifact, stop: Stop, trusted: Sequence[str] = ()) -> None:
    """Check that the spec says which code it trusts: by its version, or by the key that has signed it.

    Raises:
        TrustError: it leaves that to whatever lies at the origin.
        MissingExtraError: the package that verifies signatures is not installed.
        OriginError: the origin of what has to be signed cannot be read.
    """
    if artifact.kind != "plugin" or artifact.pinned:
        return
    if trusted:
        require_signature(resolve(artifact, stop=stop), trusted, stop)
    else:
        held = _held(artifact, stop)
        raise TrustError(
            f"{artifact.name} is code, and the spec does not pin its version",
            where=redact(artifact.uri),
            hint=f"read it, then pin what is there: version: {held}"
            if held
            else "publish it with `llm-prefetch publish`, which prints its version, and pin that",
        )


def _held(artifact: Artifact, stop: Stop) -> str:
    """The version at the origin, where it can be told without reading all of it."""
    try:
        content = resolve(artifact, stop=stop).content
    except PrefetchError:
        return ""
    return content.version if isinstance(content, Manifest) else ""


def try_plugins(
    artifacts: Sequence[Artifact],
    store: NodeStore,
    versions: Mapping[str, str],
    progress: Progress,
    stop: Stop,
) -> str:
    """Try the parsers and models that the artifacts name; the outcome in words, empty without any.

    Args:
        artifacts: Those of the spec.
        store: Where they lie, committed.
        versions: The version of each, by its name.
        progress: Told where nothing could be tried.
        stop: Ends the trial.

    Raises:
        PluginError: one of them is broken.
    """
    plugins = [
        plugin
        for artifact in artifacts
        if artifact.plugins
        for plugin in artifact.plugins.plugins(f"{artifact.name}: plugins", inside=artifact.name)
    ]
    if not plugins:
        return ""
    folders = {name: store.artifact(name, version) for name, version in versions.items()}
    models = [artifact.name for artifact in artifacts if artifact.kind == "model"]
    outcome = preflight(
        plugins, folders, tokenizer=folders[models[0]] if len(models) == 1 else None, stop=stop
    )
    if outcome == NO_VLLM:
        progress.say(f"plugins: {outcome}")
    return outcome
