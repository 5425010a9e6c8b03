"""How a replica reaches Prefect's REST API: the address, and who asks."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from llm_prefetch.errors import FallbackError
from llm_prefetch.prefect_access import authorization
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
    """What the Serve YAML says comes before the environment, all of it."""
    secrets = {"PREFECT_API_AUTH_STRING": options.auth_string, "PREFECT_API_KEY": options.api_key}
    own = {name: secret.get_secret_value() for name, secret in secrets.items() if secret}
    user = "" if options.auth_string else unquote(userinfo)
    return authorization(own if own or user else environment, user)
