"""What a capture or a proof says where Ray Serve is not installed; with it they are shown in `tests/engine`."""

from __future__ import annotations

import sys

import pytest

from llm_prefetch.capturing.trial import delete_left, serve_running
from llm_prefetch.errors import MissingExtraError


@pytest.mark.parametrize("start", [lambda: delete_left("app", print), lambda: serve_running({}).__enter__()])
def test_without_ray_serve_the_package_is_named(monkeypatch, start):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(MissingExtraError, match=r"Ray Serve.*pip install 'ray\[serve\]'"):
        start()
