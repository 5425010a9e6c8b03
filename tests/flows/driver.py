"""Runs the flow in this process, as a script of a user does: `-m tests.flows.driver '[parameters, ...]'` on a host.

For each, one line of JSON: the id of the run, its state, and how long Prefect waits for a server of its own.
"""

from __future__ import annotations

import json
import sys

# isort: split
from flows.stage import stage
from llm_prefetch.spec import Spec

# isort: split
from prefect.settings import get_current_settings

if __name__ == "__main__":
    for spec in json.loads(sys.argv[1]):
        state = stage(Spec.model_validate(spec), return_state=True)
        run = str(state.state_details.flow_run_id)
        patience = get_current_settings().server.ephemeral.startup_timeout_seconds
        print(json.dumps({"run": run, "state": state.name, "patience": patience}), flush=True)
