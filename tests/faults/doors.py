"""The doors of origins at which the proxy can stand: each scheme, by each transport and kind of credentials."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.real.azure import ACCOUNT
from tests.real.fault_proxy import FaultProxy, fault_proxy
from tests.real.hub import TOKEN, Repo

BUCKET = "faults"


@dataclass(frozen=True)
class Door:
    """One way to one origin."""

    scheme: str
    fixture: str
    """Starts the server."""
    published: bool
    """With a manifest; a listing otherwise."""
    transport: str = "auto"
    token: bool = False
    """With a bearer token, which signs nothing, so that obstore reads the ranges."""

    def uri(self, proxy: FaultProxy, prefix: str) -> str:
        """Where the files are."""
        if self.scheme == "hf":
            return f"hf://org/{prefix}"
        return f"{proxy.endpoint if self.scheme == 'http' else f'{self.scheme}:/'}/{BUCKET}/{prefix}"

    def env(self, server: Any, proxy: FaultProxy) -> dict[str, str]:
        """What leads a client to the proxy."""
        if self.scheme == "hf":
            return {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": TOKEN}
        if self.scheme == "az":
            return {**server.env, "AZURE_STORAGE_ENDPOINT": f"{proxy.endpoint}/{ACCOUNT}"}
        if self.token:
            return {"GOOGLE_BASE_URL": proxy.endpoint, "GOOGLE_BEARER_TOKEN": server.bearer_token()}
        if self.scheme == "gs":
            return {"GOOGLE_SERVICE_ACCOUNT_KEY": server.service_account(gcs_base_url=proxy.endpoint)}
        return {**server.env, "AWS_ENDPOINT_URL": proxy.endpoint}

    @contextlib.contextmanager
    def behind_proxy(self, server: Any) -> Iterator[FaultProxy]:
        """A proxy before the server; for the Hub, before the CDN that large files come from."""
        if self.scheme != "hf":
            with fault_proxy(server.endpoint) as proxy:
                yield proxy
            return
        cdn = server.cdn
        with fault_proxy(cdn) as proxy:
            server.cdn = proxy.endpoint
            try:
                yield proxy
            finally:
                server.cdn = cdn

    def put(self, server: Any, prefix: str, path: str, files: Mapping[str, bytes]) -> None:
        """Write one of `files`; the Hub gets a commit of all."""
        key = f"{prefix}/{path}"
        if self.scheme == "hf":
            server.repos.setdefault(f"org/{prefix}", Repo()).commit(dict(files))
        elif self.fixture == "s3_process":  # public, for the web has no credentials
            server.client.put_object(Bucket=BUCKET, Key=key, Body=files[path], ACL="public-read")
        else:
            server.put(BUCKET, key, files[path])


DOORS: Mapping[str, Door] = {
    "s3": Door("s3", "s3_process", published=True),
    "s3-listed": Door("s3", "s3_process", published=False),
    "s3-fsspec": Door("s3", "s3_process", published=True, transport="fsspec"),
    "s3-fsspec-listed": Door("s3", "s3_process", published=False, transport="fsspec"),
    "web": Door("http", "s3_process", published=True),
    "gs": Door("gs", "gcs_process", published=True),
    "gs-listed": Door("gs", "gcs_process", published=False),
    "gs-token": Door("gs", "gcs_process", published=False, token=True),
    "az": Door("az", "azure_process", published=True),
    "az-listed": Door("az", "azure_process", published=False),
    "hf": Door("hf", "hub_process", published=False),
}
