"""`verify --full --repair`: what is wrong is fetched again, and nothing else."""

from __future__ import annotations

from tests.samples import flip_byte


def _damage(root) -> None:
    (path,) = (root / "artifacts/weights").glob("b3-*/config.json")
    path.chmod(0o644)
    flip_byte(path)


def test_a_repair_ends_with_a_hit_and_says_what_it_fetched(run, staged, root):
    _damage(root)
    done = run("verify", "llama", "--full", "--repair")
    assert (done.code, done.rows[1][2]) == (0, "HIT")
    assert "repaired" in done.err
    assert run("verify", "--full").code == 0


def test_without_repair_the_damage_stays(run, staged, root):
    _damage(root)
    assert run("verify", "llama", "--full").code == 1
    assert run("verify", "llama").code == 1


def test_an_origin_that_is_gone_cannot_repair(run, staged, root, tmp_path):
    _damage(root)
    (tmp_path / "origin").rename(tmp_path / "gone")
    done = run("verify", "--full", "--repair")
    assert done.code == 3
    assert "config.json" in done.err


def test_a_quick_check_repairs_nothing(run, staged):
    done = run("verify", "--repair")
    assert done.code == 2
    assert "--full" in done.err
