"""How a replica reaches Prefect's REST API: the address, and who asks."""

from __future__ import annotations

import asyncio
import base64
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from llm_prefetch.errors import FallbackError
from llm_prefetch.redact import redact_text

if TYPE_CHECKING:
    import httpx

    from llm_prefetch.serve.options import PrefectOptions

REQUEST_SECONDS = 15.0


def api_url(options: PrefectOptions, environment: Mapping[str, str]) -> str:
    """The address of the API, or an empty text."""
    return options.api_url or environment.get("PREFECT_API_URL", "")


async def connect(options: PrefectOptions, environment: Mapping[str, str]) -> httpx.AsyncClient:
    """A client whose paths begin at the API, such as `flow_runs/filter`.

    Raises:
        FallbackError: the address is not known, or is none.
    """
    url = api_url(options, environment)
    if not url:
        raise FallbackError(
            "the address of Prefect's API is not known",
            where="PREFECT_API_URL",
            hint="set it in the replica's environment, or prefect.api_url in the Serve YAML",
        )
    await asyncio.to_thread(importlib.import_module, "httpx")  # half a second of the event loop's
    import httpx

    try:
        address = httpx.URL(url.rstrip("/") + "/")
    except httpx.InvalidURL as error:
        raise FallbackError(
            f"that is no address: {redact_text(str(error))}",
            where="PREFECT_API_URL",
            hint="it looks like http://prefect:4200/api",
        ) from error
    # httpx writes every address that it asks to its log: without the user's name and password.
    return httpx.AsyncClient(
        base_url=address.copy_with(userinfo=b""),
        headers=_authorization(options, environment, address.userinfo.decode()),
        timeout=REQUEST_SECONDS,
    )


def _authorization(options: PrefectOptions, environment: Mapping[str, str], userinfo: str) -> dict[str, str]:
    """As Prefect's own client: basic authentication comes before a key."""
    user = options.auth_string.get_secret_value() if options.auth_string else unquote(userinfo)
    key = options.api_key.get_secret_value() if options.api_key else ""
    if not user and not key:
        user, key = (environment.get(f"PREFECT_API_{name}", "") for name in ("AUTH_STRING", "KEY"))
    if user:
        return {"Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
    return {"Authorization": f"Bearer {key}"} if key else {}
