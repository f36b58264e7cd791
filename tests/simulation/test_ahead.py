"""Work ahead: in order, bounded, with errors at their turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from partwise.simulation.ahead import ahead
from partwise.simulation.backend import calls_of


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_results_come_in_order_and_at_most_so_many_are_made_ahead(depth):
    made, most = [], []

    def make(item):
        made.append(item)
        return 10 * item

    for number, result in enumerate(ahead(make, range(20), depth), 1):
        assert result == 10 * (number - 1)
        most.append(len(made) - number)
    assert made == list(range(20))
    assert max(most) <= depth


def test_an_error_is_raised_when_its_result_is_asked_for():
    def make(item):
        if item == 2:
            raise ValueError("the cause") from OSError("a deeper one")
        return item

    results = ahead(make, range(9), depth=4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="the cause") as caught:
        next(results)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(results) == []


def test_what_is_closed_makes_no_more(monkeypatch):
    made, begun, go = [], threading.Event(), threading.Event()

    def make(item):
        made.append(item)
        if item:
            begun.set()
            go.wait(120)
        return item

    results = ahead(make, range(1000), depth=5)
    next(results)
    begun.wait(120)
    waiting = ThreadPoolExecutor.shutdown

    def shutdown(pool, **how):
        """The item that is being made ends when the others have been cancelled, and not before."""
        waiting(pool, wait=False, **how)
        go.set()
        waiting(pool)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    results.close()
    assert made == [0, 1]
    assert not any(thread.name.startswith("partwise-ahead") for thread in threading.enumerate())


def test_the_calls_of_a_run():
    assert calls_of(0, 7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert calls_of(2, 9, 3, ends={4, 8, 20, 2}) == [(2, 4), (4, 7), (7, 8), (8, 9)]
    assert calls_of(5, 5, 3, ends={5}) == []
