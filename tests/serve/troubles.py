"""What may be wrong with a node store when a replica looks at it: how to make it so, the verdict, and the reason."""

from __future__ import annotations

import shutil

from tests.samples import as_after_reboot, only_record


def _missing(store, weights):
    shutil.rmtree(store.root / "live")
    (store.root / "live").mkdir()


def _partial(store, weights):
    weights.chmod(0o755)
    (weights / "config.json").unlink()


def _touched(store, weights):
    (weights / "config.json").chmod(0o644)
    (weights / "config.json").touch()


def _stale(store, weights):
    as_after_reboot(store, only_record(store))


def _no_record(store, weights):
    weights.with_suffix(".json").unlink()


def _bundle_gone(store, weights):
    for path in (store.root / "bundles").glob("*.json"):
        path.unlink()


def _nonsense_record(store, weights):
    path = weights.with_suffix(".json")
    path.write_text(path.read_text().replace('"config.json"', "5"))


def _half_deleted(store, weights):
    shutil.rmtree(store.root / "bundles")
    shutil.rmtree(weights)


def _no_store(store, weights):
    shutil.rmtree(store.root)


def _unknown_layout(store, weights):
    (store.root / "LAYOUT").write_text("99\n")


def _file_for_a_store(store, weights):
    shutil.rmtree(store.root)
    store.root.write_text("")


TROUBLE = {
    "nothing live": (_missing, "MISSING", "nothing is live"),
    "a file gone": (_partial, "PARTIAL", "config.json"),
    "a file touched": (_touched, "CORRUPT", "config.json"),
    "not proven since a reboot": (_stale, "STALE", "reboot"),
    "no commit record": (_no_record, "MISSING", "no commit record"),
    "no bundle": (_bundle_gone, "MISSING", "bundle is gone"),
    "half of the store deleted": (_half_deleted, "MISSING", "bundle is gone"),
    "a record full of nonsense": (_nonsense_record, "MISSING", "no commit record"),
}
NO_STORE = {
    "no store": (_no_store, "MISSING", "no node store here"),
    "an unknown layout": (_unknown_layout, "MISSING", "layout '99'"),
    "a file where the store should be": (_file_for_a_store, "MISSING", "a file is in the way"),
}
