"""The ledger keeps whole rows, and never stands in the way of the work."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_prefetch import ledger
from llm_prefetch.ledger import Trace


def test_rows_come_back_in_order_and_by_kind(store):
    ledger.append(store, "a", x=1)
    ledger.append(store, "b", x=2)
    ledger.append(store, "a", x=3)
    assert [row["x"] for row in ledger.read(store)] == [1, 2, 3]
    assert [row["x"] for row in ledger.read(store, "a")] == [1, 3]
    assert [row["x"] for row in ledger.read(store, "a", "b")] == [1, 2, 3]


def test_no_ledger_has_no_rows(store):
    assert ledger.read(store) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1000))
def test_a_torn_row_costs_only_itself(store, at):
    store.ledger.unlink(missing_ok=True)
    ledger.append(store, "a", x=1, text="ü\n\u2028")
    whole = store.ledger.stat().st_size
    ledger.append(store, "a", x=2)
    cut = whole + at % (store.ledger.stat().st_size - 1 - whole)
    store.ledger.write_bytes(store.ledger.read_bytes()[:cut])
    ledger.append(store, "a", x=3)
    assert [row["x"] for row in ledger.read(store)] == [1, 3]


def test_rows_of_several_writers_do_not_mix(store):
    def write(number):
        for count in range(50):
            ledger.append(store, "a", writer=number, count=count, text="x" * 500)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = ledger.read(store)
    assert len(rows) == 200
    for number in range(4):
        assert [row["count"] for row in rows if row["writer"] == number] == list(range(50))


def test_foreign_lines_are_left_out(store):
    store.ledger.write_bytes(b'\n[1]\n"a"\n\xff\xfe\n{"kind":"a","x":1}\n')
    assert [row["x"] for row in ledger.read(store)] == [1]


def test_a_ledger_that_cannot_be_written_is_a_warning(store, caplog):
    store.ledger.mkdir()
    with caplog.at_level(logging.WARNING):
        ledger.append(store, "a")
    assert "cannot be written" in caplog.text


def test_a_trace_tells_its_steps_as_they_begin_and_how_they_ended():
    seen = []
    ledger.observers.append(seen.append)
    try:
        trace = Trace()
        with trace.step("one", artifact="w") as row:
            row["bytes"] = 5
        with pytest.raises(ZeroDivisionError), trace.step("two"):
            raise ZeroDivisionError
    finally:
        ledger.observers.remove(seen.append)
    assert seen == ["one", "two"]
    assert [(row["step"], row.get("bytes"), "seconds" in row) for row in trace.steps] == [
        ("one", 5, True),
        ("two", None, True),
    ]
