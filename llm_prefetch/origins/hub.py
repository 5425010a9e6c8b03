"""`hf://org/repo[@revision]`: a model of the Hugging Face Hub, or of what `HF_ENDPOINT` names.

The Hub's own client finds the token (`HF_TOKEN`, or the one that `hf auth login` stored), turns the revision
into a commit before anything moves, lists that commit and says where large files are. Their bytes come by
ranges from the CDN, which never sees the token; small files come from the Hub itself.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from llm_prefetch.errors import (
    MissingExtraError,
    OriginAccessError,
    OriginChangedError,
    OriginError,
    OriginNotFoundError,
    OriginUnavailableError,
    PrefetchError,
    UnsupportedOriginError,
)
from llm_prefetch.origins.base import ObjectInfo
from llm_prefetch.origins.http_refusal import retry_after
from llm_prefetch.origins.located import LocatedReader, Locations, read_whole
from llm_prefetch.origins.stated import Stated
from llm_prefetch.redact import redact

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from llm_prefetch.origins.ranged_http import Signed

_URI = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([^@?#\s]+))?/?", re.ASCII)
_SHA256 = "sha256:"
_UNAVAILABLE = frozenset({408, 425, 429})
_SERVER_ERROR = 500
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Tree:
    """What one commit holds."""

    commit: str
    files: Mapping[str, ObjectInfo]


class HubOrigin:
    """One revision of a model repository; the commit is looked up once and holds for this object's life."""

    states_in_list = True
    """Each etag is a digest of the file: see `stated`."""

    def __init__(self, uri: str) -> None:
        """Take `hf://org/repo[@revision]`; nothing is asked of the Hub yet."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise UnsupportedOriginError(
                "not a model of the Hub",
                where=redact(uri),
                hint="write hf://org/repo or hf://org/repo@revision; choose folders by include",
            )
        self.uri = uri
        self.repo, self._revision = match[1], match[2] and match[2].rstrip("/")
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self._api = _open_api(self.endpoint, uri)
        self._lock = threading.Lock()
        self._tree: _Tree | None = None
        self._locations = Locations(self._locate, self._locate_by_metadata)

    @property
    def commit(self) -> str:
        """What the revision was when it was looked up."""
        return self._look().commit

    def list(self) -> Iterator[ObjectInfo]:
        """Every file of the commit; its etag is the SHA-256 that the Hub states for it, or git's id of it."""
        yield from self._look().files.values()

    def stat(self, path: str) -> ObjectInfo | None:
        """The file at `path`."""
        return self._look().files.get(path)

    def stated(self, item: ObjectInfo) -> Stated | None:
        """What the etag says: the SHA-256 of a file in LFS, git's id of any other."""
        kind, _, digest = item.etag.partition(":")
        return Stated(kind, digest) if digest else None

    def read(self, path: str, limit: int) -> bytes:
        """The whole of a small file."""
        return read_whole(self.reader(), self._file(path), limit, self.uri)

    def reader(self) -> LocatedReader:
        """A reader for one thread; what a commit holds cannot change."""
        return LocatedReader(self._locations, self.uri, lambda _item, _headers: True)

    def write(self, path: str, body: BinaryIO, size: int) -> str:  # noqa: ARG002 (others need it)
        """Refuse: a commit is made by the Hub's own tools."""
        raise UnsupportedOriginError(
            "hf:// can only be read", where=self.uri, hint="upload with `hf upload`, then stage"
        )

    def _look(self) -> _Tree:
        with self._lock:
            if self._tree is None:
                try:
                    info = self._api.repo_info(self.repo, revision=self._revision, timeout=_TIMEOUT_SECONDS)
                    commit = info.sha or ""
                    entries = self._api.list_repo_tree(self.repo, revision=commit, recursive=True)
                    files = (_info(entry) for entry in entries if hasattr(entry, "blob_id"))
                    self._tree = _Tree(commit, {file.path: file for file in files})
                except Exception as error:
                    raise self._error(error) from error
            return self._tree

    def _file(self, path: str) -> ObjectInfo:
        found = self._look().files.get(path)
        if found is None:
            raise OriginNotFoundError(
                f"{path!r} is not in this revision", where=self.uri, hint="check the revision"
            )
        return found

    def _locate(self, path: str) -> Signed:
        """Small files are asked of the Hub directly, which saves a question for each."""
        if self._file(path).etag.startswith(_SHA256):
            return self._locate_by_metadata(path)
        return self._resolve_url(path), self._auth()

    def _locate_by_metadata(self, path: str) -> Signed:
        """Where the Hub says that the bytes are; the Hub's headers go nowhere else."""
        file, url = self._file(path), self._resolve_url(path)
        try:
            found = self._api.get_hf_file_metadata(url=url, timeout=_TIMEOUT_SECONDS)
        except Exception as error:
            raise self._error(error) from error
        stated = f"{_SHA256}{found.etag}"
        if file.etag.startswith(_SHA256) and len(stated) == len(file.etag) and stated != file.etag:
            raise OriginChangedError(
                f"{path!r} is not the file of this commit",
                where=self.uri,
                hint="check HF_ENDPOINT, then stage",
            )
        here, there = urlsplit(url), urlsplit(found.location)
        own = (here.scheme, here.netloc) == (there.scheme, there.netloc)
        return found.location, self._auth() if own else {}

    def _resolve_url(self, path: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo, path, revision=self.commit, endpoint=self.endpoint)

    def _auth(self) -> dict[str, str]:
        from huggingface_hub import utils

        headers: dict[str, str] = utils.build_hf_headers(library_name="llm-prefetch")  # type: ignore[attr-defined]
        return headers

    def _error(self, error: Exception) -> PrefetchError:
        """The client's errors are many, and their texts hold addresses, which may be signed."""
        from huggingface_hub import errors

        if isinstance(error, PrefetchError):
            return error
        if isinstance(error, errors.GatedRepoError):
            return OriginAccessError(
                "the model is gated",
                where=self.uri,
                hint="accept its licence on the page of the model, and set HF_TOKEN to a token of that account",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            what, hint = f"no such revision {self._revision!r}", "name a branch, a tag or a commit"
            return OriginNotFoundError(what, where=self.uri, hint=hint)
        if isinstance(error, errors.RepositoryNotFoundError):
            return OriginNotFoundError(
                "no such model, or a private one",
                where=self.uri,
                hint="check the name; for a private model set HF_TOKEN",
            )
        if isinstance(error, errors.EntryNotFoundError):
            return OriginNotFoundError("no such file", where=self.uri, hint="check the revision")
        return self._by_status(error)

    def _by_status(self, error: Exception) -> OriginError:
        response = getattr(error, "response", None)
        status: int = getattr(response, "status_code", 0)
        what = f"the Hub answered {status}" if status else f"the Hub failed: {type(error).__name__}"
        if status in (401, 403):
            return OriginAccessError(what, where=self.uri, hint="check HF_TOKEN and what it may read")
        if status and status not in _UNAVAILABLE and status < _SERVER_ERROR:
            return OriginError(what, where=self.uri, hint="check the model's name and HF_ENDPOINT")
        return OriginUnavailableError(
            what,
            where=self.uri,
            hint="check HF_ENDPOINT, HF_HUB_OFFLINE and the network, then stage again",
            retry_after=retry_after(getattr(response, "headers", {})),
        )


def _open_api(endpoint: str | None, uri: str) -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingExtraError(
            "hf:// needs huggingface_hub", where=uri, hint="pip install 'llm-prefetch[hf]'"
        ) from error
    return HfApi(endpoint=endpoint, library_name="llm-prefetch")


def _info(entry: Any) -> ObjectInfo:  # noqa: ANN401 (RepoFile, whose module moved between versions)
    tag = f"{_SHA256}{entry.lfs.sha256}" if entry.lfs else f"git:{entry.blob_id}"
    return ObjectInfo(entry.path, entry.lfs.size if entry.lfs else entry.size, tag)
