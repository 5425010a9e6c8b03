from __future__ import annotations

import pytest

from tests.crash.world import make_world


@pytest.fixture(scope="module")
def world():
    with pytest.MonkeyPatch.context() as patch, make_world(patch) as made:
        yield made
