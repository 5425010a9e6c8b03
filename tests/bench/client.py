"""One client at work, in a process of its own: `python -m tests.bench.client NAME ARGUMENT...`. Prints JSON.

Its wall and processor time, and the peak of its memory; what was imported before the work began costs memory but
no time, because a flow, a replica and a node's agent have it loaded.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Work = Callable[[], Any]
"""What is timed; what it returns is added to the result."""


def stage(root: str, *uris: str) -> Work:
    """Our staging, digests and commit included; each URI after the first is a newer version of the same artifact."""
    from llm_prefetch import ledger, spec, store
    from llm_prefetch import stage as stages

    node = store.open_store(Path(root), create=True)

    def work() -> dict[str, float]:
        for uri in uris:
            wanted = {"deployment": "bench", "artifacts": [{"name": "weights", "uri": uri}]}
            stages.stage(spec.parse_spec(wanted, "bench"), node)
        steps = {row["step"]: row for row in ledger.read(node, "stage")[-1]["steps"]}
        return {
            "seconds": steps["commit"]["at"] + steps["commit"]["seconds"],  # from here on a replica can start
            "transfer": steps["transfer"]["seconds"],
            "sync": steps["sync"]["seconds"],
        }

    return work


def boto3_download(folder: str, uri: str, *tuning: str) -> Work:
    """boto3's transfer manager, one for all files; `tuned` or with its own settings."""
    from boto3.s3.transfer import create_transfer_manager

    client, config = _boto3(tuning)
    bucket, prefix = _bucket_and_prefix(uri)

    def work() -> None:
        with create_transfer_manager(client, config) as manager:
            futures = []
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
                for item in page["Contents"]:
                    target = Path(folder, item["Key"].removeprefix(f"{prefix}/"))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    futures.append(manager.download(bucket, item["Key"], str(target)))
            for future in futures:
                future.result()

    return work


def ray_download(folder: str, uri: str) -> Work:
    """What a Ray Serve LLM replica's node initialization runs for a `bucket_uri`."""
    from ray.llm._internal.common.utils.cloud_utils import CloudFileSystem

    return lambda: CloudFileSystem.download_model(folder, uri, tokenizer_only=False)


def s3fs_download(folder: str, uri: str) -> Work:
    """s3fs's recursive get."""
    import s3fs

    files = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def work() -> None:
        files.get(f"{uri}/", f"{folder}/", recursive=True)

    return work


def publish(source: str, uri: str) -> Work:
    """Our publish, manifest included."""
    from llm_prefetch import publish as publishes

    def work() -> None:
        publishes.publish(Path(source), uri)

    return work


def boto3_upload(source: str, uri: str, *tuning: str) -> Work:
    """boto3's transfer manager, one for all files."""
    from boto3.s3.transfer import create_transfer_manager

    client, config = _boto3(tuning)
    bucket, prefix = _bucket_and_prefix(uri)
    base = Path(source)

    def work() -> None:
        with create_transfer_manager(client, config) as manager:
            paths = [path for path in sorted(base.rglob("*")) if path.is_file()]
            futures = [
                manager.upload(str(path), bucket, f"{prefix}/{path.relative_to(base)}") for path in paths
            ]
            for future in futures:
                future.result()

    return work


def program(*argv: str) -> Work:
    """Any program; its own start is part of it."""

    def work() -> None:
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)

    return work


CLIENTS: dict[str, Callable[..., Work]] = {
    "stage": stage,
    "boto3": boto3_download,
    "ray": ray_download,
    "s3fs": s3fs_download,
    "publish": publish,
    "boto3-upload": boto3_upload,
    "program": program,
}


def main(name: str, *arguments: str) -> None:
    """Prepare, then do the work and print what it took."""
    work = CLIENTS[name](*arguments)
    before, begin = _cpu(), time.perf_counter()
    more = work()
    seconds = time.perf_counter() - begin
    if name == "program":
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    else:  # not `ru_maxrss`, which begins at what the parent had when it started this process
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    print(
        json.dumps(
            {"seconds": seconds, "whole": seconds, "cpu": _cpu() - before, "peak": peak, **(more or {})}
        )
    )


def _cpu() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _bucket_and_prefix(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    return parts.netloc, parts.path.strip("/")


def _boto3(tuning: tuple[str, ...]) -> tuple[Any, Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    if "tuned" in tuning:
        config = TransferConfig(max_concurrency=16, multipart_chunksize=16 * 2**20)
    else:
        config = TransferConfig()
    return boto3.client("s3", config=Config(max_pool_connections=32)), config


if __name__ == "__main__":
    main(*sys.argv[1:])
