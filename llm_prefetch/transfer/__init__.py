"""The transfer: fetch the chunks of a plan in parallel, hash them in memory, put each straight to its place.

Each worker owns one connection and one small buffer that it reuses, so memory does not depend on the size of
files or chunks, and no byte is read back to be verified. The crew of workers grows and shrinks with what the
origin bears; a worker whose reader does not answer is interrupted, and replaced if that does not help.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llm_prefetch import settings
from llm_prefetch.errors import disk_error
from llm_prefetch.journal import Journal
from llm_prefetch.plan import Plan
from llm_prefetch.progress import Progress
from llm_prefetch.stop import Stop
from llm_prefetch.transfer.crew import Crew
from llm_prefetch.transfer.pacing import Retries, Throttle
from llm_prefetch.transfer.partial_files import PartialFiles
from llm_prefetch.transfer.worker import PIECE_BYTES, Job

__all__ = ["PIECE_BYTES", "Throttle", "transfer"]


def transfer(
    plan: Plan, tree: Path, journal: Journal, progress: Progress, *, throttle: Throttle, stop: Stop
) -> Mapping[str, int]:
    """Bring every chunk of `plan` into `tree` and enter it into `journal`, which must be open.

    Returns:
        The inode of each file by path: the commit checks that just these files are what it publishes.

    Raises:
        OriginError: the origin failed for good, or longer than the retries last; or `stop` was set.
        DigestError: the origin delivers other bytes than the manifest says.
        UnsafePathError: something in `tree` is in the way.
        DiskError: the disk refused.
    """
    files = PartialFiles(plan, tree)
    try:
        files.prepare()
    except OSError as error:
        raise disk_error(error, str(tree)) from error
    most = min(settings.CONCURRENCY.get(), len(plan.chunks))
    if most:
        retries = Retries(len(plan.chunks), most)
        Crew(Job(plan, files, journal, progress, throttle, retries, stop), most).work()
    return files.inodes
