"""A fast S3-like origin on this machine: nginx serves the bytes and one listing made beforehand.

It has three doors to the same bytes: plain, with TLS, and slow on each connection.
Signatures are not checked, and only `ListObjectsV2`, `HEAD` and ranged `GET` are answered: enough for obstore, our
reader and s5cmd, and fast enough that the client is what is measured.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from tests.bench.certificates import make_certificates
from tests.real.ports import free_port, listens

BUCKET = "bench"
_CONFIG = """
daemon off; pid {base}/pid; error_log {base}/error.log; worker_processes auto; {user}
events {{ worker_connections 2048; }}
http {{
    log_format bytes '$request_method $uri $status $body_bytes_sent $http_range';
    access_log {base}/access.log bytes;
    client_body_temp_path {base}/t1; proxy_temp_path {base}/t2; fastcgi_temp_path {base}/t3;
    uwsgi_temp_path {base}/t4; scgi_temp_path {base}/t5;
    sendfile on; tcp_nopush on; keepalive_requests 100000; default_type application/octet-stream;
    root {data};
    # AES-128 where the client has it, as Amazon S3 chooses: so every client pays for the same cipher.
    ssl_certificate {server}; ssl_certificate_key {key}; ssl_session_cache shared:tls:1m;
    ssl_protocols TLSv1.2 TLSv1.3; ssl_prefer_server_ciphers on;
    ssl_ciphers ECDHE-ECDSA-AES128-GCM-SHA256:HIGH;
    ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384;
    # The listing of a prefix is a file, named by the prefix with "-" for "/".
    map $args $prefix {{ default ""; ~list-type=2 listed; }}
    map $arg_prefix $listing {{ default $arg_prefix; ~^(?<name>[a-z0-9]+) $name; }}
{servers}}}
"""
_SERVER = """    server {{
        listen {host}:{port}{how};
        location = /{bucket} {{ rewrite ^ /{bucket}/ last; }}
        location = /{bucket}/ {{ default_type application/xml; try_files /.listing/$listing.xml =404; }}
    }}
"""
SLOW_MB = 10
"""What the slow door lets through on one connection, in MiB/s."""


@dataclass(frozen=True)
class Door:
    """One way into the origin: plain, with TLS, or slow on every connection."""

    endpoint: str
    trust: Mapping[str, str]

    @property
    def env(self) -> dict[str, str]:
        """What obstore, boto3 and s5cmd need to use it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "S3_ENDPOINT_URL": self.endpoint,  # as s5cmd calls it
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            **self.trust,
        }


@dataclass(frozen=True)
class FastOrigin:
    """A running nginx."""

    doors: Mapping[str, Door]
    """`plain`, `tls` and `slow`."""
    data: Path
    log: Path

    def folder(self, prefix: str) -> Path:
        """Where the objects of a prefix lie."""
        return self.data / BUCKET / prefix

    def write_listing(self, prefix: str) -> str:
        """Write the listing of a prefix, which must be one plain word; returns its URI."""
        base = self.folder(prefix)
        rows = []
        for path in sorted(path for path in base.rglob("*") if path.is_file()):
            found = path.stat()
            key = f"{prefix}/{path.relative_to(base).as_posix()}"
            etag = f"&quot;{int(found.st_mtime):x}-{found.st_size:x}&quot;"  # as nginx makes it
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{found.st_size}</Size><ETag>{etag}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        listing = self.data / ".listing" / f"{prefix}.xml"
        listing.parent.mkdir(exist_ok=True)
        listing.write_text(
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        )
        return f"s3://{BUCKET}/{prefix}"

    def mark(self) -> int:
        """Where the log ends now, for `served`."""
        return self.log.stat().st_size

    def served(self, mark: int = 0) -> list[Served]:
        """What was answered since `mark`, an answer that was cut short too; manifests and listings left out."""
        with self.log.open() as log:
            log.seek(mark)
            lines = [line.split() for line in log if line.endswith("\n")]
        return [
            Served(uri, int(sent), wanted)
            for method, uri, _, sent, wanted in lines
            if method == "GET" and "/.l" not in uri
        ]

    def data_bytes(self, mark: int = 0) -> int:
        """Bytes of objects that were served since `mark`."""
        return sum(answer.bytes for answer in self.served(mark))


@dataclass(frozen=True)
class Served:
    """One answer."""

    uri: str
    bytes: int
    range: str


@contextlib.contextmanager
def fast_origin(base: Path, host: str = "127.0.0.1") -> Iterator[FastOrigin]:
    """Run nginx on free ports of `host` for the length of the block.

    Raises:
        RuntimeError: there is no nginx, or it does not start.
    """
    program, certificates = _nginx(base), make_certificates(base / "tls")
    ports = {name: free_port() for name in ("plain", "tls", "slow")}
    how = {"plain": "", "tls": " ssl", "slow": f"; limit_rate {SLOW_MB}m"}
    data = base / "origin"
    (data / BUCKET).mkdir(parents=True, exist_ok=True)
    user = "user root;" if os.geteuid() == 0 else ""
    servers = "".join(
        _SERVER.format(host=host, port=port, how=how[name], bucket=BUCKET) for name, port in ports.items()
    )
    config = base / "nginx.conf"
    config.write_text(
        _CONFIG.format(
            base=base, user=user, data=data, server=certificates.server, key=certificates.key, servers=servers
        )
    )
    log = base / "access.log"
    log.unlink(missing_ok=True)
    argv = [program, "-p", str(base), "-e", str(base / "error.log"), "-c", str(config)]
    server = subprocess.Popen(argv)
    try:
        deadline = time.monotonic() + 10
        while not all(listens(host, port) for port in ports.values()):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"nginx does not start; see {base / 'error.log'}")
            time.sleep(0.05)
        doors = {
            name: Door(
                f"http{'s' * (name == 'tls')}://{host}:{port}", certificates.env if name == "tls" else {}
            )
            for name, port in ports.items()
        }
        yield FastOrigin(doors, data, log)
    finally:
        server.terminate()
        server.wait(10)


def _nginx(base: Path) -> str:
    """The program: from this machine, or unpacked, not installed, from the distribution's package."""
    unpacked = base / "nginx" / "usr" / "sbin" / "nginx"
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or (
        unpacked.exists() and unpacked
    )
    if found:
        return str(found)
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise RuntimeError("there is no nginx on this machine")
    print("fetching nginx with apt-get and unpacking it into .bench", flush=True)
    try:
        subprocess.run(["apt-get", "download", "nginx"], cwd=base, check=True, capture_output=True)
        subprocess.run(
            ["dpkg", "-x", *base.glob("nginx_*.deb"), base / "nginx"], check=True, capture_output=True
        )
        subprocess.run([unpacked, "-v"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"nginx cannot be fetched: {error}") from error
    return str(unpacked)
