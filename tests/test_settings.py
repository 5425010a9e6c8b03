"""A slip in an environment variable must never stop a replica."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llm_prefetch import settings


@pytest.mark.parametrize("setting", settings.ALL, ids=lambda setting: setting.name)
def test_every_setting_has_a_prefix_a_meaning_and_a_default_that_can_be_read(setting, monkeypatch):
    monkeypatch.delenv(setting.name, raising=False)
    assert setting.name.startswith("LLM_PREFETCH_")
    assert setting.doc.endswith(".")
    assert setting.get() == setting.parse(setting.default)


def test_the_environment_is_read_on_access(monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", "3")
    assert settings.CONCURRENCY.get() == 3
    monkeypatch.setenv("LLM_PREFETCH_CONCURRENCY", " 4 ")
    assert settings.CONCURRENCY.get() == 4


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (settings.CONCURRENCY, "many"),
        (settings.CONCURRENCY, "0"),
        (settings.ATTEMPTS, "-1"),
        (settings.ATTEMPTS, "1.5"),
        (settings.STALL_SECONDS, "0"),
        (settings.STALL_SECONDS, "-1"),
        (settings.LOCK_SECONDS, "nan"),
        (settings.LOCK_SECONDS, "inf"),
        (settings.SWITCH_SECONDS, "soon"),
        (settings.ROOT, "relative/path"),
    ],
)
def test_a_value_that_cannot_be_read_is_ignored_with_a_warning(setting, text, monkeypatch, caplog):
    monkeypatch.setenv(setting.name, text)
    with caplog.at_level(logging.WARNING):
        assert setting.get() == setting.parse(setting.default)
    assert setting.name in caplog.text
    assert repr(text) in caplog.text


def test_an_empty_value_means_the_default(monkeypatch, caplog):
    monkeypatch.setenv("LLM_PREFETCH_ATTEMPTS", "  ")
    assert settings.ATTEMPTS.get() == 8
    assert not caplog.records


def test_the_root_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_ROOT", "~/models")
    assert settings.ROOT.get() == Path.home() / "models"


def test_no_patience_is_a_patience(monkeypatch):
    monkeypatch.setenv("LLM_PREFETCH_LOCK_SECONDS", "0")
    assert settings.LOCK_SECONDS.get() == 0
