"""`publish` and `sign`: a local folder becomes an artifact at an origin, and somebody vouches for it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_prefetch.cli.bars import progress_bar
from llm_prefetch.cli.display import print_json, say
from llm_prefetch.errors import UsageError
from llm_prefetch.progress import size
from llm_prefetch.publish import publish
from llm_prefetch.redact import redact
from llm_prefetch.sealing import seal_prefix
from llm_prefetch.signatures import OUTDATED, is_outdated, load_signing_key, sign_published


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:  # noqa: ANN401 (argparse's private type)
    """Add `publish` and `sign`."""
    parser = commands.add_parser(
        "publish",
        parents=parents,
        help="copy a local folder to an origin, with its manifest",
        description="Copy the folder SRC to URI, with a manifest that makes every chunk verifiable. Prints the\n"
        "version, which an artifact of a SPEC may pin.",
        epilog="example:\n  llm-prefetch publish ./llama-3-8b s3://bucket/models/llama-3-8b\n"
        "  llm-prefetch publish --manifest-only s3://bucket/models/llama-3-8b",
    )
    parser.add_argument("src", metavar="SRC", type=Path, nargs="?", help="local folder")
    parser.add_argument(
        "uri",
        metavar="URI",
        help="where to: s3://, gs://, abfss:// or az://, file:///folder, or what else fsspec writes, such as sftp://",
    )
    parser.add_argument("--dry-run", action="store_true", help="compute the version; write nothing")
    parser.add_argument(
        "--manifest-only",
        action="store_true",
        help="URI holds the files already: read them there, write the manifest",
    )
    parser.add_argument("--sign", metavar="KEYFILE", type=Path, help="sign it with this private key")
    parser.set_defaults(run=_publish)
    signer = commands.add_parser(
        "sign",
        parents=parents,
        help="vouch for what is published, with a private key",
        description="Sign the manifest at URI, if it is VERSION, with the Ed25519 key in KEYFILE. A SPEC that names the\n"
        "public key, which is printed, in `policy.trusted_keys` need not pin the version.",
        epilog="example:\n  llm-prefetch sign s3://bucket/caches/llama-3-8b-a10g b3-51c0... signing.pem",
    )
    signer.add_argument("uri", metavar="URI", help="where it was published")
    signer.add_argument("version", metavar="VERSION", help="as `publish` or `capture` has printed it")
    signer.add_argument("key", metavar="KEYFILE", type=Path, help="private key in PEM")
    signer.set_defaults(run=_sign)


def _publish(options: argparse.Namespace) -> int:
    if options.manifest_only == (options.src is not None):
        what = "--manifest-only takes no SRC" if options.manifest_only else "SRC is missing"
        raise UsageError(what, hint="publish SRC URI, or publish --manifest-only URI")
    key = load_signing_key(options.sign) if options.sign else None
    with progress_bar(quiet=options.json) as progress:
        if options.manifest_only:
            report = seal_prefix(options.uri, progress=progress, dry_run=options.dry_run)
        else:
            report = publish(options.src, options.uri, progress=progress, dry_run=options.dry_run)
    if key is not None:
        if not options.dry_run:
            sign_published(options.uri, report.version, key)
    elif not options.dry_run and is_outdated(options.uri, report.version):
        say(OUTDATED)
    if options.json:
        print_json(asdict(report) | ({"signed_by": key.public} if key is not None else {}))
    else:
        done = "would publish" if options.dry_run else "sealed" if options.manifest_only else "published"
        files = "1 file" if report.files == 1 else f"{report.files} files"
        kept = f" ({report.kept} were there already)" if report.kept else ""
        print(f"{done} {files}, {size(report.bytes)}, to {report.uri}{kept}\nversion: {report.version}")
        if key is not None:
            print(f"signed by: {key.public}")
    return 0


def _sign(options: argparse.Namespace) -> int:
    key = load_signing_key(options.key)
    sign_published(options.uri, options.version, key)
    if options.json:
        print_json({"uri": redact(options.uri), "version": options.version, "signed_by": key.public})
    else:
        print(f"signed by: {key.public}")
    return 0
