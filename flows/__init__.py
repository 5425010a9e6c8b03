"""Prefect flows of llm-prefetch: decorators and wiring only; what they do is in `llm_prefetch`."""

import os

# Without a server Prefect starts one of its own, which takes 14 to 20 s on a cold machine: as long as its default
# patience. Read when Prefect is imported, so it is set here, before any flow module.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "60")
