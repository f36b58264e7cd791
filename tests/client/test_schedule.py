from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.client.batches import Batches, Examples, draw, over_batches
from partwise.client.split import alternate, everything
from partwise.types import UserError


def steps_of(count: int, batch_size: int, epochs: int | None, max_steps: int | None) -> list[list[int]]:
    """The obvious twin: the members of every batch, in order."""
    cut = [list(range(count))[i : i + batch_size] for i in range(0, count, batch_size)]
    if epochs is None:
        epochs = max_steps  # more than enough
    return (cut * epochs)[:max_steps] if max_steps is not None else cut * epochs


limits = st.tuples(st.none() | st.integers(0, 4), st.none() | st.integers(0, 9)).filter(
    lambda pair: pair != (None, None)
)


@given(st.integers(0, 20), st.integers(1, 7), limits)
def test_number_of_steps_equals_the_twin(count, batch_size, limit):
    schedule = Batches(batch_size, *limit).check("test")
    assert int(schedule.num_steps(np.int32(count))) == len(steps_of(count, batch_size, *limit))


@pytest.fixture(scope="module")
def visits():
    """Runs over the batches of one client and notes, for every step, which of its examples were real."""

    def run(schedule, subset, start, count, longest):
        examples = Examples({"x": jnp.arange(40)}, {}, {}, start, count, longest)

        def body(i, drawn, seen):
            return seen.at[i].set(jnp.where(drawn.mask, drawn.batch["x"], -1), mode="drop")

        return over_batches(body, jnp.full((30, schedule.batch_size), -1), examples, subset, schedule)

    compiled = jax.jit(run, static_argnums=(0, 1))
    return lambda *given: [[x for x in row if x >= 0] for row in np.asarray(compiled(*given)).tolist()]


@pytest.mark.parametrize("count", [0, 1, 3, 6, 7])
@pytest.mark.parametrize(("epochs", "max_steps"), [(1, None), (3, 5), (None, 8)])
def test_batches_are_the_clients_own_rows_in_order(visits, count, epochs, max_steps):
    """Whatever the longest client needs, the others turn with empty batches once they are done."""
    expected = [[10 + j for j in batch] for batch in steps_of(count, 3, epochs, max_steps)]
    seen = visits(Batches(3, epochs, max_steps), everything, 10, count, 11)
    assert seen[: len(expected)] == expected
    assert not any(seen[len(expected) :])


def test_batches_of_a_subset(visits):
    """Of 11 examples, alternate(2) gives 0 1, 4 5, 8 9 to support; batches of 4 cut that anew."""
    seen = visits(Batches(4, 1), alternate(2).support, 0, 11, 11)
    assert [batch for batch in seen if batch] == [[0, 1, 4, 5], [8, 9]]


def test_draw_past_the_end_is_empty_and_in_bounds():
    examples = Examples({"x": jnp.arange(5.0)}, {}, {}, 2, 3, 9)
    drawn = draw(examples, everything, Batches(2, 1), jnp.asarray(2))
    assert not drawn.mask.any()
    assert drawn.batch["x"].tolist() == [2.0, 2.0]  # its own first example, not a neighbour's


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Batches(0), "update: the batch size must be at least 1, not 0"),
        (Batches(5, None, None), "update: give epochs, max_steps or both"),
        (Batches(5, -1), "update: epochs must not be negative, not -1"),
        (Batches(5, 1, -2), "update: max_steps must not be negative, not -2"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(schedule, message):
    with pytest.raises(UserError, match=message):
        schedule.check("update")
