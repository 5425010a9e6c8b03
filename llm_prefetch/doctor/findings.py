"""What a look at one thing tells: one line, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from llm_prefetch.errors import PrefetchError


class Outcome(StrEnum):
    """How it stands with one thing."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    about: str
    outcome: Outcome
    says: str
    mend: str = ""

    @classmethod
    def ok(cls, about: str, says: str) -> Finding:
        """It is as it should be."""
        return cls(about, Outcome.OK, says)

    @classmethod
    def warning(cls, about: str, says: str, mend: str) -> Finding:
        """It works, but it will not always."""
        return cls(about, Outcome.WARNING, says, mend)

    @classmethod
    def failed(cls, about: str, says: str, mend: str) -> Finding:
        """A staging or a start will fail by this."""
        return cls(about, Outcome.FAILED, says, mend)

    @classmethod
    def skipped(cls, about: str, says: str, mend: str = "") -> Finding:
        """It was not looked at."""
        return cls(about, Outcome.SKIPPED, says, mend)

    @classmethod
    def of(cls, about: str, error: PrefetchError) -> Finding:
        """What an error says."""
        where = f" ({error.where})" if error.where else ""
        return cls(about, Outcome.FAILED, f"{error.message}{where}", error.hint)


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether nothing has failed."""
    return all(finding.outcome is not Outcome.FAILED for finding in findings)
