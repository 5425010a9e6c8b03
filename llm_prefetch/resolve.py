"""From an artifact of the SPEC to what exactly is to be staged: a manifest, or a listing without digests yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from llm_prefetch import manifest as manifests
from llm_prefetch.errors import DigestError, OriginNotFoundError, SpecError
from llm_prefetch.manifest import ListedFile, Listing, Manifest
from llm_prefetch.origins import Origin, open_origin
from llm_prefetch.origins.asking import ask
from llm_prefetch.paths import check_paths
from llm_prefetch.redact import redact
from llm_prefetch.spec import Artifact
from llm_prefetch.stop import Stop


@dataclass(frozen=True, slots=True)
class Source:
    """An artifact and what its origin holds: with digests (`Manifest`) or not yet (`Listing`)."""

    artifact: Artifact
    origin: Origin
    content: Manifest | Listing

    @property
    def key(self) -> str:
        """Names the work in progress: the version, or the listing's key."""
        return self.content.version if isinstance(self.content, Manifest) else self.content.key


def resolve(artifact: Artifact, *, pinned: Manifest | None = None, stop: Stop | None = None) -> Source:
    """Find out what to stage.

    Args:
        artifact: Of the spec.
        pinned: A manifest that the run already knows.
        stop: Ends it, also while the origin does not answer.

    Raises:
        OriginError: the origin cannot be read, also when it is asked again, or is empty; or it is time to end.
        DigestError: it does not hold the version that the spec pins.
        UnsafePathError: the origin names a path that must not be written.
    """
    origin = ask(lambda: open_origin(artifact.uri, artifact.transport), stop)
    if pinned is not None:
        content: Manifest | Listing = pinned
    elif ask(lambda: origin.stat(manifests.PATH), stop) is not None:
        data = ask(lambda: origin.read(manifests.PATH, manifests.MAX_MANIFEST_BYTES), stop)
        published = manifests.parse_manifest(data, f"{redact(artifact.uri).rstrip('/')}/{manifests.PATH}")
        content = published.select(_chosen(artifact, (file.path for file in published.files)))
    else:
        content = list_prefix(artifact, origin, stop)
    if artifact.version and isinstance(content, Manifest) and content.version != artifact.version:
        what = "the run" if pinned is not None else "the origin"
        raise DigestError(
            f"{what} holds {content.version}, the spec pins {artifact.version}",
            where=redact(artifact.uri),
            hint="pin the published version, or publish the pinned one again",
        )
    return Source(artifact, origin, content)


def list_prefix(artifact: Artifact, origin: Origin, stop: Stop | None = None) -> Listing:
    """What the origin holds, without the manifest, sorted by path.

    Raises:
        OriginError: it cannot be listed, or holds nothing.
        UnsafePathError: it names a path that must not be written.
    """
    found = ask(lambda: list(origin.list()), stop)
    listed = {info.path: info for info in found if not info.path.startswith(f"{manifests.FOLDER}/")}
    if not listed:
        raise OriginNotFoundError(
            "nothing there: the prefix is empty or does not exist",
            where=redact(artifact.uri),
            hint="check the uri",
        )
    check_paths(listed, redact(artifact.uri))
    files = (listed[path] for path in sorted(_chosen(artifact, listed)))
    return Listing(tuple(ListedFile(info.path, info.size, info.etag) for info in files))


def _chosen(artifact: Artifact, paths: Iterable[str]) -> list[str]:
    """The paths that the include and exclude patterns leave; `*` crosses folders, as in `original/*`."""
    chosen = [
        path
        for path in paths
        if (not artifact.include or any(fnmatchcase(path, pattern) for pattern in artifact.include))
        and not any(fnmatchcase(path, pattern) for pattern in artifact.exclude)
    ]
    if not chosen:
        raise SpecError(
            f"the patterns of artifact {artifact.name!r} leave no file",
            where=redact(artifact.uri),
            hint="mend include or exclude",
        )
    return chosen
