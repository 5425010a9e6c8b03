"""What one machine says of itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from llm_prefetch.doctor import look
from llm_prefetch.store import NodeStore
from tests.samples import as_nobody


def test_a_store_is_described_and_nothing_is_left_behind(store: NodeStore) -> None:
    before = sorted(store.root.rglob("*"))
    facts = look(str(store.root))
    assert (facts.root, facts.store, facts.trouble, facts.split) == (str(store.root), True, "", ())
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert facts.file_system
    assert abs(facts.clock - time.time()) < 60
    assert facts.packages["ray"]
    assert sorted(store.root.rglob("*")) == before


def test_a_root_that_is_not_there_yet_is_judged_by_where_it_would_be_made(tmp_path: Path) -> None:
    facts = look(str(tmp_path / "a" / "b"))
    assert (facts.store, facts.trouble) == (False, "")
    assert facts.free_bytes > 0
    assert not (tmp_path / "a").exists()


def test_an_unknown_layout_is_trouble_with_its_mend(store: NodeStore) -> None:
    (store.root / "LAYOUT").write_text("99\n")
    facts = look(str(store.root))
    assert "layout '99'" in facts.trouble
    assert facts.mend


def test_a_file_in_the_way_is_trouble(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    assert "in the way" in look(str(tmp_path / "root")).trouble


@pytest.mark.usefixtures("nobodys_folder")
def test_a_root_that_this_user_may_not_write_is_trouble(nobodys_folder: Path) -> None:
    root = nobodys_folder / "root"
    root.mkdir(mode=0o555)
    root.chmod(0o555)
    with as_nobody():
        facts = look(str(root))
    assert facts.trouble.startswith("cannot write there: Permission denied")
    assert "write access" in facts.mend
