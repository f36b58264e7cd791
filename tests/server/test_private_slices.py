"""Slices from two servers: two key spaces, of which one is asked with bit strings and one with point functions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `privacy` is not installed")

from partwise.model.partition import Partition, keyed, partition
from partwise.model.spec import Metric, Model, squared_error
from partwise.privacy.retrieval import query_sizes
from partwise.privacy.sealing import new_sealing_key
from partwise.privacy.selection_bits import POINTS, STRINGS, way_of
from partwise.privacy.two_servers import Agreement, TableForm
from partwise.server.messages import About
from partwise.server.private_slices import (
    PrivateQuestion,
    ask_privately,
    bucketed,
    helper_answer,
    plain_rows,
    read_privately,
    read_question,
    row_bytes,
    write_joined,
)
from partwise.types import UserError

WORDS, UNITS, VERSION = 6200, 50, 3
PRIVATE, PUBLIC = new_sealing_key()
KEYS = {"word": np.array([0, 77, 6199]), "unit": np.array([49])}


class Setting(NamedTuple):
    agreement: Agreement
    here: About
    parts: Partition
    params: dict
    tables: dict


@pytest.fixture(scope="module")
def setting():
    def init(rng: jax.Array) -> dict:
        word, unit = jax.random.split(rng)
        return {
            "word": jax.random.normal(word, (WORDS, 2)),
            "unit": jax.random.normal(unit, (UNITS, 3)),
            "dense": jnp.arange(5.0),
        }

    error = lambda outputs, batch: squared_error(outputs, batch, "y")
    model = Model(init, lambda params, batch, rng: params["dense"], error, {"rmse": Metric(error)})
    parts = partition(model, {"word": keyed("word"), "unit": keyed("unit")})
    form = lambda space, most: TableForm(parts.num_keys(space), most, 1, row_bytes(parts, space))
    agreement = Agreement("run", 1, 0, {"word": form("word", 4), "unit": form("unit", 2)})
    params = model.init(jax.random.key(1))
    here, rows = About("run", VERSION, "task", parts.digest), plain_rows(parts, params)
    return Setting(agreement, here, parts, params, bucketed(agreement, VERSION, rows))


def asked(setting: Setting, keys=KEYS) -> PrivateQuestion:
    return ask_privately(setting.agreement, PUBLIC, setting.here, keys)


def helped(setting: Setting, public: bytes, sealed: bytes, task="task") -> bytes:
    return helper_answer(setting.agreement, PRIVATE, setting.tables, VERSION, task, public, sealed)


def test_the_spaces_are_asked_in_both_ways(setting):
    ways = {space: way_of(setting.agreement.layout(space)) for space in setting.agreement.tables}
    assert ways == {"word": POINTS, "unit": STRINGS}


def test_slices_are_those_of_the_table(setting):
    question = asked(setting)
    read = read_question(setting.agreement, question.message)
    theirs = helped(setting, read.public, read.sealed)
    agreement, here, parts, params, tables = setting
    answer = write_joined(agreement, parts, params, tables, read, theirs, jax.random.key(0), here)
    slices = read_privately(agreement, parts, here, answer, question, KEYS)
    np.testing.assert_array_equal(slices.params["word"], setting.params["word"][KEYS["word"]])
    np.testing.assert_array_equal(slices.params["unit"], setting.params["unit"][KEYS["unit"]])
    np.testing.assert_array_equal(slices.params["dense"], setting.params["dense"])


def test_questions_have_the_sizes_of_the_layouts(setting):
    word, unit = (query_sizes(setting.agreement.layout(space), 0) for space in setting.agreement.tables)
    for keys in (
        KEYS,
        {"word": np.arange(0), "unit": np.arange(0)},
        {"word": np.arange(4), "unit": np.arange(2)},
    ):
        read = read_question(setting.agreement, asked(setting, keys).message)
        assert (len(read.public), unit.to_both) == (word.to_both, 0)
        assert len(read.sealed) == 48 + 16 + word.to_second + 16 + unit.to_second
        assert {space: len(each) for space, each in read.to_first.items()} == {"word": 16, "unit": 16}


def test_the_helper_answers_what_belongs_together(setting):
    """A box opens with the task and with what both servers are told, and with nothing else."""
    one, two = (read_question(setting.agreement, asked(setting).message) for _ in range(2))
    for public, sealed, task in (
        (two.public, one.sealed, "task"),
        (one.public[:-1], one.sealed, "task"),
        (b"", one.sealed, "task"),
        (one.public, one.sealed, "another"),
    ):
        with pytest.raises(UserError, match="cannot be opened"):
            helped(setting, public, sealed, task)


def test_a_client_of_another_agreement_is_refused(setting):
    """Its messages are of another size, or its box is bound to another run."""
    tables = dict(setting.agreement.tables)
    other = setting.agreement._replace(tables=tables | {"word": tables["word"]._replace(most=5)})
    with pytest.raises(UserError):
        read_question(setting.agreement, ask_privately(other, PUBLIC, setting.here, KEYS).message)
    read = read_question(other, ask_privately(other, PUBLIC, setting.here, KEYS).message)
    with pytest.raises(UserError, match="must have"):
        helped(setting, read.public, read.sealed)
