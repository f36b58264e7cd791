"""Loops that may be recorded on a GPU, and which of two programs is used."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import programs
from partwise.programs import jit_program, only_counts


def times(number, x):
    return jax.lax.fori_loop(0, number, lambda _, y: jnp.sin(y), x)


def until_large(_, x):
    return jax.lax.while_loop(lambda y: y.sum() < 10, lambda y: 2 * y, x)


GIVEN = (np.int32(3), np.ones(4, np.float32))
COUNTED = {
    "no loop": lambda n, x: n + x,
    "a number that is known": lambda n, x: times(3, x),
    "a number that is not": times,
    "scan": lambda n, x: jax.lax.scan(lambda y, z: (y + z, y), 0.0, x),
    "one in another": lambda n, x: jax.lax.fori_loop(0, n, lambda _, y: times(n, y), x),
    "lanes with one number": lambda n, x: jax.vmap(lambda y: times(n, y))(x),
    "in a condition": lambda n, x: jax.lax.cond(n > 2, lambda: times(n, x), lambda: x),
}
OTHERS = {
    "a sum": until_large,
    "a float": lambda n, x: jax.lax.while_loop(lambda y: y < 10.0, lambda y: 2 * y, x[0]),
    "lanes with numbers of their own": lambda n, x: jax.vmap(times)(jnp.arange(4) * n, x),
    "inside of others": lambda n, x: jax.lax.fori_loop(0, n, lambda _, y: jax.jit(until_large)(n, y), x),
    "in a branch": lambda n, x: jax.lax.cond(n > 2, lambda: until_large(n, x), lambda: x),
    "in a scan": lambda n, x: jax.lax.scan(lambda y, z: (until_large(n, y), z), x, x)[0],
    "draws that are refused": lambda n, x: jax.random.gamma(jax.random.key(0), x),
    "two conditions": lambda n, x: jax.lax.while_loop(
        lambda k: (k < n) & (k < 2 * n), lambda k: k + 1, jnp.int32(0)
    ),
}


def lowered(function):
    return jax.jit(function).lower(*GIVEN).compiler_ir().operation


@pytest.mark.parametrize("name", COUNTED)
def test_loops_that_count_are_known(name):
    assert only_counts(lowered(COUNTED[name]))


@pytest.mark.parametrize("name", OTHERS)
def test_loops_that_end_for_another_reason_are_found_wherever_they_are(name):
    assert not only_counts(lowered(OTHERS[name]))


@pytest.fixture
def asked(monkeypatch):
    """A GPU that is none: the options with which programs are made, and then run without."""
    options, jit = [], jax.jit

    def without(function, compiler_options=None, **more):
        return _Told(jit(function, **more), compiler_options, options)

    monkeypatch.setattr(programs.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(programs.jax, "jit", without)
    return options


class _Told:
    def __init__(self, program, options, told):
        self.program, self.options, self.told = program, options, told

    def __call__(self, *given):
        self.told.append(self.options)
        return self.program(*given)

    def __getattr__(self, name):
        return getattr(self.program, name)


@pytest.mark.parametrize(("function", "options"), [(times, programs.RECORDED), (until_large, None)])
def test_a_gpu_records_loops_that_count_and_no_others(asked, function, options):
    program = jit_program(function, donate_argnums=(1,))
    for _ in range(2):
        assert np.array_equal(program(GIVEN[0], jnp.ones(4)), function(*map(jnp.asarray, GIVEN)))
    assert asked == [options] * 2
    assert program._cache_size() == 1


def test_a_gpu_whose_xla_does_not_know_the_option_does_without(asked, monkeypatch):
    def refuse():
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option")

    monkeypatch.setattr(programs, "jnp", SimpleNamespace(negative=lambda _: refuse()))
    jit_program(times)(*GIVEN)
    assert asked == [None]


def test_a_cpu_uses_its_widest_vectors():
    program = jit_program(times).lower(*GIVEN).compile()
    np.testing.assert_allclose(program(*GIVEN), times(*map(jnp.asarray, GIVEN)), rtol=1e-6)
