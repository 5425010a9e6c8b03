"""How Prefect's API is reached, without Prefect: its address and credentials, found as Prefect's own client does."""

from __future__ import annotations

import base64
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from llm_prefetch.errors import SpecError

_SETTINGS = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY")


@dataclass(frozen=True, slots=True)
class PrefectAccess:
    """Where the API is, and the headers that let us in."""

    url: str
    """Without a slash at its end, and without a password."""
    headers: Mapping[str, str]


def prefect_access(settings: Mapping[str, str]) -> PrefectAccess | None:
    """What `settings` (an environment) say; `None` where they name no API.

    Raises:
        SpecError: the address is none.
    """
    url = settings.get("PREFECT_API_URL", "").strip()
    if not url:
        return None
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise SpecError(
            f"that is no address: {url.rpartition('@')[2]!r}",
            where="PREFECT_API_URL",
            hint="it looks like http://prefect:4200/api",
        )
    user, at, host = parts.netloc.rpartition("@")
    plain = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
    return PrefectAccess(plain, authorization(settings, unquote(user) if at else ""))


def authorization(settings: Mapping[str, str], user: str = "") -> dict[str, str]:
    """As Prefect's own client: basic authentication comes before a key."""
    user = user or settings.get("PREFECT_API_AUTH_STRING", "")
    if user:
        return {"Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
    key = settings.get("PREFECT_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def prefect_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What `environment` and, below it, the active profile of `prefect config set` say about the API."""
    found: dict[str, Any] = {}
    try:
        home = Path(environment.get("PREFECT_HOME") or Path.home() / ".prefect")
        path = Path(environment.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
        profiles = tomllib.loads(path.read_text("utf-8"))
        active = environment.get("PREFECT_PROFILE") or profiles.get("active")
        found = profiles.get("profiles", {}).get(active) or {}
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):
        found = {}  # no home, no file, or one that is no profile
    return {
        name: str(environment.get(name) or found.get(name)) for name in _SETTINGS
        if environment.get(name) or found.get(name)
    }  # fmt: skip
