"""What a client can add to a sum of whole numbers, in the units of its noise: never more than the noise is made
for, however its numbers are rounded."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise.algorithms.registry import prepare
from partwise.config.protection import protection
from partwise.config.secure_sums import bits_for
from partwise.metrics import Sums
from partwise.runs.resolve import resolve
from partwise.server.encoding import fixed_point
from partwise.server.mean import mean, uniform
from partwise.server.total import Report
from partwise.server.word_form import NUM_SUMS, WordForm

KEYS, DIM = 8, 2
NUMBERS = DIM + KEYS * DIM
SMALL = {
    "data.num_clients": 40,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": DIM,
    "cohort.size": 6,
    "cohort.sampling": "poisson",
    "server.weighting": "uniform",
    "privacy.noise": 1.0,
    "privacy.keys": KEYS,
    "privacy.sums": "two_servers",
}


def made(clip: float, share: float, cohort: int):
    """The real aggregator of a configuration as a program, the form of its words, its door, and its grid."""
    changes = {"privacy.clip": clip, "privacy.share": share, "cohort.size": cohort}
    task, config = resolve("planted", None, {**SMALL, **changes})
    prepared = prepare(task, config)
    algorithm = prepared.build(prepared.rates)
    promised = protection(config, prepared.store.num_clients)
    assert promised is not None
    form = WordForm(algorithm.aggregator, algorithm.partition)
    return jax.jit(algorithm.aggregator.encode), form, promised.door, 2.0 ** bits_for(promised)


@pytest.fixture(scope="module", params=[(0.05, 0.1, 6), (1.0, 1.0, 20), (300.0, 5.0, 6)], ids=str)
def real(request):
    return made(*request.param)


def norm(form, door, grid, sent) -> float:
    """Of all words that a client sends. A count's noise is larger than an update's, and its weight smaller."""
    words = form.of(sent)
    numbers = lambda each: each.view(np.int32).astype(np.float64).reshape(-1) / grid
    update = [numbers(words.dense[:-NUM_SUMS]), *map(numbers, words.tables.values())]
    counts = numbers(words.dense[-NUM_SUMS:]) * (door.deviation / door.count_deviation)
    return float(np.linalg.norm(np.concatenate([*update, counts])))


def report(numbers, loss: float) -> Report:
    """Of a client with these changes: of the users' default, and of its rows."""
    numbers = jnp.asarray(numbers, jnp.float32)
    update = {"default/user": numbers[:DIM], "item": numbers[DIM:].reshape(KEYS, DIM)}
    return Report(update, jnp.asarray(3.0), Sums(jnp.asarray(loss), jnp.asarray(1.0)))


def some_numbers(rng, kind: str) -> np.ndarray:
    """Changes in one number, in all alike, or in all by different amounts."""
    if kind == "one":
        return np.eye(1, NUMBERS, rng.integers(NUMBERS))[0]
    if kind == "alike":
        return rng.choice([-1.0, 1.0], NUMBERS)
    return rng.normal(size=NUMBERS) * rng.exponential(size=NUMBERS)


@settings(max_examples=60)
@given(
    st.integers(0, 2**31 - 1),
    st.sampled_from(["one", "alike", "many"]),
    st.floats(-8, 30).map(lambda power: 10.0**power),
    st.sampled_from([0.0, 0.7, 9.999999, 10.0, 1e9, math.inf, math.nan]),
)
def test_no_rounded_client_adds_more_than_the_noise_is_made_for(real, seed, kind, size, loss):
    encode, form, door, grid = real
    rng = np.random.default_rng(seed)
    sent = encode(report(size * some_numbers(rng, kind), loss), jax.random.key(seed))
    assert norm(form, door, grid, sent) <= door.clip * math.sqrt(1 + 2 * door.share**2)


def test_large_clients_use_most_of_what_they_may(real):
    """The bound is no accident: the clip leaves little of it unused."""
    encode, form, door, grid = real
    sent = encode(report(np.full(NUMBERS, 1e3), 1e9), jax.random.key(0))
    assert norm(form, door, grid, sent) > 0.999 * door.clip * math.sqrt(1 + 2 * door.share**2)


@pytest.mark.parametrize("bits", [20, 23])
def test_whole_numbers_are_never_rounded(bits):
    """A client is one client: if it counted for more in some rounds, it would add more than one may."""
    ones = Report({"rows": jnp.ones(20_000)}, jnp.ones(()), Sums(jnp.ones(()), jnp.ones(())))
    sent = jax.jit(fixed_point(mean(uniform), bits).encode)(ones, jax.random.key(1))
    assert (np.asarray(sent.update["rows"]) == 2**bits).all()
