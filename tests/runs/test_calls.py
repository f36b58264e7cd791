"""Calls from Python that cannot be meant: each gets an error that says what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import partwise as pw
from partwise.data import planted_ratings
from partwise.runs.personal import Personal
from partwise.types import RunWarning


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"server_rate": 0.1},
            r"nearest: server.rate.*in Python, server__rate=... or changes=\{\"server.rate\"",
        ),
        ({"settings": {"server.rate": 0.1}}, r"no argument settings: give them as changes=\{"),
        (
            {"task": planted_ratings(num_clients=2).store},
            r"is a ClientStore: make a Task first, .*ratings_task",
        ),
    ],
)
def test_what_train_cannot_take_is_named(arguments, says):
    with pytest.raises(pw.UserError, match=says):
        pw.train(**arguments)


@pytest.fixture
def mine(tmp_path):
    """A client's file: the model knows the first item only."""
    file = tmp_path / "mine.csv"
    file.write_text("item,rating\n1,4\nnone,3\n")
    return file


def test_what_was_read_can_be_given_as_it_is(tiny_run, mine):
    me = Personal.open(tiny_run)
    with pytest.warns(
        RunWarning, match=r"1 row of '\S+mine.csv' with a value of 'item' .* left out .*`rows`"
    ):
        file = me.read(mine, ("item", "rating"))
    assert (file.rows.tolist(), file.unknown) == ([0], {"item": 1})
    local = me.personalize(file)
    assert np.array_equal(local["user"], me.personalize(file.examples)["user"])
    assert np.array_equal(me.predict(local, file), me.predict(local, file.examples))


CALLS: list[tuple[Callable[[Personal, Any], Any], str]] = [
    (
        lambda me, path: me.personalize(path),
        r"the examples are a \w+: give what `read` of the model returned",
    ),
    (lambda me, path: me.predict({}, [1, 2]), "the examples are a list: give what `read`"),  # pyright: ignore
    (lambda me, path: me.read(path, "item"), r"columns is the text 'item': give a list .*columns=\['item'\]"),
    (lambda me, path: me.read(path, ("itm",)), r"unknown column of the model 'itm' \(nearest: item\)"),
]


@pytest.mark.parametrize(("call", "says"), CALLS)
def test_what_a_model_for_one_client_cannot_take_is_named(tiny_run, mine, call, says):
    with pytest.raises(pw.UserError, match=says):
        call(Personal.open(tiny_run), mine)
