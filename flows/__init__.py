"""Prefect flows of llm-prefetch: decorators and wiring only; what they do is in `llm_prefetch`."""

import logging
import os

# Prefect reads its settings when it is imported, so these are set here, before any flow module. A deployed run
# imports Prefect first: `deployments/prefect.yaml` sets for it what it needs.
#
# Without a server Prefect starts one of its own, which takes 14 to 20 s on a cold machine: as long as its default
# patience.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "60")
# What the library logs is shown in the run. Prefect hands on what passes the logger's own level.
os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "llm_prefetch")
# The library has threads of its own, and is used outside of runs too: no warning for what cannot be shown there.
os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
if logging.getLogger("llm_prefetch").level == logging.NOTSET:
    logging.getLogger("llm_prefetch").setLevel(logging.INFO)
