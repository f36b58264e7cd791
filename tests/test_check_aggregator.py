"""`check_aggregator` does with an aggregator what rounds do: one that cannot run them fails it, with the reason."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from partwise.server.encoding import clipped, fixed_point
from partwise.server.mean import mean, uniform
from partwise.server.total import Contribution, Report
from partwise.testing import check_aggregator

MEAN = mean(uniform)


def encoding(change):
    """The mean, with contributions changed by a function of (report, contribution)."""

    def encode(report: Report, rng: jax.Array) -> Contribution:
        return change(report, MEAN.encode(report, rng))

    return MEAN._replace(encode=encode)


def decoding(change, **more):
    """The mean, with what it decodes changed by a function of (total, carried, mean)."""

    def decode(partition, total, carried, rng):
        return change(total, carried, MEAN.decode(partition, total, carried, rng)[0])

    return MEAN._replace(decode=decode, **more)


def other_shapes(report, sent):
    return sent._replace(update={path: leaf.reshape(1, -1) for path, leaf in sent.update.items()})


def control_flow(report, sent):
    largest = max(float(jnp.abs(leaf).max()) for leaf in report.update.values())
    return sent if largest < 100 else sent._replace(valid=jnp.asarray(False))


def smaller_type(report, sent):
    return sent._replace(update={path: leaf.astype(jnp.float16) for path, leaf in sent.update.items()})


COUNTER = {"rounds": {"done": jnp.zeros((), jnp.int32)}}


def other_state(total, carried, found):
    return found, {"rounds": {"done": carried["rounds"]["done"] + 1.5}}


def only_one_leaf(total, carried, found):
    return {"x": found["x"]}, carried


def remembers():
    """Python state beside the state that an aggregator carries: compiled, it changes once."""
    seen = []

    def encode(report, rng):
        sent = MEAN.encode(report, rng)
        largest = isinstance(sent.weight, jax.core.Tracer)
        seen.append(1)
        factor = 1.0 + (len(seen) if largest else 0)
        return sent._replace(update={path: factor * leaf for path, leaf in sent.update.items()})

    return MEAN._replace(encode=encode)


@pytest.mark.parametrize(
    ("aggregator", "why"),
    [
        (encoding(other_shapes), r"encode gives 'x' the shape \(1, 3\); it must stay \(3,\)"),
        (encoding(lambda report, sent: sent.update), "encode must return a Contribution, not dict"),
        (encoding(lambda r, s: s._replace(weight=jnp.ones(2))), r"encode's weight must be one number, not \(2,\)"),
        (encoding(control_flow), r"encode fails in a round \(Concret.*compiled code.*use jnp.where"),
        (encoding(smaller_type), "of 'x' encode makes float16, and zero float32"),
        (MEAN._replace(zero=lambda leaf: jnp.ones(leaf.shape)), "zero must return zeros: every device"),
        (
            decoding(lambda total, carried, found: (found, {"n": carried["count"]})),
            r"decode fails in a round \(KeyError: 'count'\)",
        ),
        (decoding(lambda total, carried, found: found), "decode must return .mean update, what it carries on"),
        (decoding(other_state, init=lambda partition: COUNTER), "must have the names, shapes and types that it"),
        (decoding(only_one_leaf), r"every leaf, \['item', 'x'\], not \['x'\]"),
        (
            MEAN._replace(held=("item",), decode=lambda p, total, c, r: ({"x": total.held["song"]}, c)),
            r"decode fails in a round \(KeyError: 'song'\)",
        ),
        (MEAN._replace(reveal=lambda total, carried, rng: total), "reveal must return .total, what it carries"),
        (remembers(), "Mismatched elements"),
    ],
)  # fmt: skip
def test_an_aggregator_that_cannot_run_fails_with_the_reason(aggregator, why):
    with pytest.raises(AssertionError, match=rf"(?s){why}"):
        check_aggregator(aggregator)


@pytest.mark.parametrize(
    "aggregator",
    [
        mean(),
        clipped(MEAN, 10.0),
        fixed_point(mean(), 20),
        mean(over_holders=("item",)),
        decoding(
            lambda total, carried, found: (found, {"rounds": {"done": carried["rounds"]["done"] + 1}}),
            init=lambda partition: COUNTER,
        ),
    ],
)
def test_one_that_can_passes(aggregator):
    check_aggregator(aggregator, tol=1e-4)
