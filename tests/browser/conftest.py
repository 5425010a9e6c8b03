"""The flows and their server, as the tests of flows have them."""

from __future__ import annotations

from tests.flows.conftest import flows

__all__ = ["flows"]
