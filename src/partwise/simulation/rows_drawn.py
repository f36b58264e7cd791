"""Some rows of a table, as a model's `init` draws them, without drawing the others.

`init` is traced, and its operations are applied to these rows alone. This gives the same bits, because JAX draws
number i of an array from i and the key alone (threefry, partitionable). It works if the table is drawn and then
changed element by element, as by most initialisers of JAX; otherwise `rows_of` returns None, and the table must be
made whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

FEWEST = 1024  # a smaller table is made whole: its number of rows could be that of anything
WIDEST = 1 << 15  # the most numbers in a row
# fmt: off
ELEMENTWISE = {
    "abs", "add", "and", "atan2", "bitcast_convert_type", "ceil", "clamp", "convert_element_type", "copy",
    "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan",
    "tanh", "xor",
}
# fmt: on


class _NotByRowsError(Exception):
    """The rows of a value depend on other rows."""


def leaf_of(init: Callable[[jax.Array], jax.Array], rng: jax.Array) -> jax.Array:
    """What `init(rng)` returns. Nothing is made that it does not need."""
    traced = jax.make_jaxpr(init)(rng)
    return _Rows(None, 0).run(0, traced.jaxpr, traced.consts, [rng])[0]


def rows_of(
    init: Callable[[jax.Array], jax.Array], rng: jax.Array, size: int
) -> Callable[[jax.Array, int], jax.Array] | None:
    """A function `(rng, first) -> rows`: `size` rows of `init(rng)`, from number `first` on. None if it cannot be
    done."""
    traced = jax.make_jaxpr(init)(rng)
    num_rows = traced.out_avals[0].shape[0]
    wide = math.prod(traced.out_avals[0].shape[1:]) > WIDEST
    if num_rows < FEWEST or wide or not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    some = _Rows(num_rows, size)
    rows = lambda rng, first: some.run(first, traced.jaxpr, traced.consts, [rng])[0]
    try:
        jax.eval_shape(rows, rng, 0)
    except _NotByRowsError:
        return None
    return rows


class _Rows:
    """Runs a traced function for some rows. Arrays with as many rows as the table stand for these rows. What `init`
    compiles as one program is one here too, so that it is rounded alike."""

    def __init__(self, num_rows: int | None, size: int):
        self._all, self._size = num_rows, size
        self._programs: dict[int, Callable[..., list[Any]]] = {}

    def run(self, first: Any, jaxpr: Any, consts: Any, arguments: Any) -> list[Any]:
        here = [self._cut(constant, first) for constant in consts]
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*here, *arguments), strict=True))
        made_by = {out: equation for equation in jaxpr.eqns for out in equation.outvars}

        def value(atom: Any) -> Any:
            if isinstance(atom, jex.core.Literal):
                return atom.val
            if atom not in known:  # only what the result needs
                equation = made_by[atom]
                found = self._apply(first, equation, [value(each) for each in equation.invars])
                known.update(zip(equation.outvars, found, strict=True))
            return known[atom]

        found = [value(out) for out in jaxpr.outvars]
        known.clear()  # `value` refers to itself, so it would keep these arrays until garbage is collected
        return found

    def _cut(self, constant: Any, first: Any) -> Any:
        """These rows of a constant of the program, if it has the table's rows."""
        if not self._is_table(jax.typeof(constant)):
            return constant
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(constant), first, self._size)

    def _is_table(self, aval: Any) -> bool:
        return bool(getattr(aval, "shape", ())) and aval.shape[0] == self._all

    def _apply(self, first: Any, equation: Any, values: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
            if id(equation) not in self._programs:
                run = lambda first, *values: self.run(first, inner.jaxpr, inner.consts, values)
                self._programs[id(equation)] = jax.jit(run)
            return self._programs[id(equation)](first, *values)
        if not any(self._is_table(each.aval) for each in (*equation.invars, *equation.outvars)):
            found = equation.primitive.bind(*values, **params)
            return list(found) if equation.primitive.multiple_results else [found]
        return [self._by_rows(first, equation, name, values)]

    def _by_rows(self, first: Any, equation: Any, name: str, values: list[Any]) -> Any:
        params, aval = equation.params, equation.outvars[0].aval
        if not self._is_table(aval):
            raise _NotByRowsError(name)
        if name in ELEMENTWISE:
            return equation.primitive.bind(*values, **params)
        if name == "random_bits" and params["bit_width"] == 32:
            return self._bits(first, values[0], aval)
        if name == "broadcast_in_dim" and len(equation.invars) == 1:
            shape, along = (self._size, *aval.shape[1:]), params["broadcast_dimensions"]
            if self._is_table(equation.invars[0].aval) and along[0] != 0:
                raise _NotByRowsError(name)  # its rows become columns, of which there are as many
            return jax.lax.broadcast_in_dim(values[0], shape, along)
        if name == "iota":
            begin = first if params["dimension"] == 0 else 0
            here = jax.lax.broadcasted_iota(
                params["dtype"], (self._size, *aval.shape[1:]), params["dimension"]
            )
            return here + jnp.asarray(begin, params["dtype"])
        raise _NotByRowsError(name)

    def _bits(self, first: Any, key: jax.Array, aval: Any) -> jax.Array:
        """The random bits of these rows: threefry of the place of every number, in two words of 32 bits."""
        if str(jax.random.key_impl(key)) != "threefry2x32":
            raise _NotByRowsError("other random numbers")
        width = math.prod(aval.shape[1:])
        row = jnp.asarray(first, jnp.uint32) + jnp.arange(self._size, dtype=jnp.uint32)
        low = row * jnp.uint32(width)
        high = ((row >> 16) * width + (((row & 0xFFFF) * width) >> 16)) >> 16
        column = jnp.arange(width, dtype=jnp.uint32)
        place = low[:, None] + column
        high = high[:, None] + (place < column).astype(jnp.uint32)
        words = jax.random.key_data(key)
        drawn = jex.random.threefry_2x32(words, jnp.concatenate([high.ravel(), place.ravel()]))
        one, other = jnp.split(drawn, 2)
        return (one ^ other).reshape((self._size, *aval.shape[1:]))
