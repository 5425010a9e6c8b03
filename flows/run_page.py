"""What a person sees on the page of a run: the names of its artifacts."""

from __future__ import annotations

import re


def artifact_key(*parts: str) -> str:
    """An artifact key: Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
