"""Runs a flow in this process, as a script of a user does: `-m tests.flows.driver stage '[parameters, ...]'` on a host.

For each, one line of JSON: the id of the run, its state, and how long Prefect waits for a server of its own.
"""

from __future__ import annotations

import importlib
import json
import sys

# isort: split
import flows  # noqa: F401 (sets what Prefect reads when it is imported)

# isort: split
from prefect.settings import get_current_settings

if __name__ == "__main__":
    name = sys.argv[1].replace("-", "_")
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    for parameters in json.loads(sys.argv[2]):
        state = flow(**parameters, return_state=True)
        run = str(state.state_details.flow_run_id)
        patience = get_current_settings().server.ephemeral.startup_timeout_seconds
        print(json.dumps({"run": run, "state": state.name, "patience": patience}), flush=True)
