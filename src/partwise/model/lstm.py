"""Long short-term memory (Hochreiter and Schmidhuber, 1997) as plain functions, made for small batches in
loops.

What does not depend on the state is computed for all times at once: the product with the inputs, and in the
gradient the products for the weights (automatic differentiation would add these step by step). The loops over
time are not unrolled: on a CPU, unrolled loops are slower and take much longer to compile. The number of units is
padded, so that no product and no gate begins in the middle of a row of memory.

On an accelerator one case has a form of its own: weights that are not trained, as while clients rebuild local
embeddings, and in evaluations. Then all clients have the same weights, products are fast, and what counts is how
much is moved. Inputs and states are multiplied at once, also back, and times are unrolled, so that nothing is
stacked and cut again.

`dtype` is the type of the numbers that products read and write, and of what is kept for the gradient. With
bfloat16, a step moves half as many bytes. Products are summed in float32, and cells and parameters are kept
in float32, for every `dtype`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

ALIGNED = 8  # a GPU multiplies twice as fast if the length of a row is a multiple of this
MANY_TIMES = 32  # more are not unrolled, as programs would take too long to compile


def init_lstm(rng: jax.Array, size: int, units: int) -> dict[str, jax.Array]:
    """Initial parameters: weights Glorot-uniform over input and state together, biases 0, and 1 for the
    forget gate. TensorFlow's cell does this, and so does LEAF. The gates are side by side: input, forget,
    output, candidate."""
    weights = jax.nn.initializers.glorot_uniform()(rng, (size + units, 4 * units))
    return {
        "input": weights[:size],
        "recurrent": weights[size:],
        "bias": jnp.zeros(4 * units).at[units : 2 * units].set(1.0),
    }


def lstm(params: dict[str, jax.Array], inputs: jax.Array, real: jax.Array, dtype: Any = None) -> jax.Array:
    """The states after every time, [T, B, units], for inputs [T, B, size]. Where `real` [T, B] is False, the
    state does not change. So the last state is the one after the last real input, for any place of the
    padding."""
    units, dtype = params["recurrent"].shape[0], dtype or inputs.dtype
    wide = {name: _aligned_gates(leaf) for name, leaf in params.items()}
    recurrent = _aligned(wide["recurrent"], 0)
    looped = jax.default_backend() == "cpu" or len(inputs) > MANY_TIMES
    run = _looped if looped else _unrolled_if_frozen
    given = inputs.astype(dtype), wide["input"].astype(dtype), recurrent, wide["bias"], real[..., None]
    return run(*given)[..., :units]


def _looped(
    inputs: jax.Array, weights: jax.Array, recurrent: jax.Array, bias: jax.Array, real: jax.Array
) -> jax.Array:
    return _states(dense(inputs, weights, bias).astype(inputs.dtype), recurrent, real)


def _aligned(x: jax.Array, axis: int) -> jax.Array:
    """`x` with zeros at the end of an axis, up to a multiple of `ALIGNED`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % ALIGNED)
    return jnp.pad(x, widths)


def _aligned_gates(x: jax.Array) -> jax.Array:
    """The four gates in the last axis, each padded. A unit that is padding stays 0, and so do its gradients."""
    gates = _aligned(x.reshape(*x.shape[:-1], 4, -1), -1)
    return gates.reshape(*x.shape[:-1], -1)


def dense(x: jax.Array, weights: jax.Array, bias: jax.Array, dtype: Any = None) -> jax.Array:
    """`x @ weights + bias` in float32. The product is read and written in `dtype`, and so are its gradients."""
    return _dense(x.astype(dtype or x.dtype), weights.astype(dtype or weights.dtype), bias)


@jax.custom_vjp
def _dense(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    return (x @ weights).astype(bias.dtype) + bias


def _dense_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradient of the bias is one row of the product for the weights. If it were a sum, XLA would compute
    the summed values again."""
    x, weights = kept
    size, flat = len(weights), gradient.astype(x.dtype).reshape(-1, gradient.shape[-1])
    with_one = _aligned(jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1), -1).reshape(len(flat), -1)
    to_both = with_one.T @ flat
    return (flat @ weights.T).reshape(x.shape), to_both[:size], to_both[size].astype(gradient.dtype)


_dense.defvjp(lambda x, weights, bias: (_dense(x, weights, bias), (x, weights)), _dense_backward)


@jax.custom_vjp
def _states(given: jax.Array, recurrent: jax.Array, real: jax.Array) -> jax.Array:
    return _forward(given, recurrent, real)[0]


def _forward(given: jax.Array, recurrent: jax.Array, real: jax.Array) -> tuple[jax.Array, Any]:
    units, dtype = recurrent.shape[0], given.dtype
    recurrent = recurrent.astype(dtype)

    def step(carry: Any, now: Any) -> Any:
        (state, cell), (drive, here) = carry, now
        drive = drive + state @ recurrent
        after = _after(drive, state, cell, here)
        return after, (after[0], cell.astype(dtype), drive)

    start = jnp.zeros_like(given[0, :, :units])
    _, (states, cells, drives) = jax.lax.scan(step, (start, start.astype(jnp.float32)), (given, real))
    return states, (states, cells, drives, recurrent, real)


def _backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """`cells` are those before every time."""
    states, cells, drives, recurrent, real = kept
    dtype = states.dtype

    def step(carry: Any, now: Any) -> Any:
        d_gates, d_state, d_cell = _before(*carry, *now)
        d_gates = d_gates.astype(dtype)
        return (d_gates @ recurrent.T + d_state, d_cell), d_gates

    start = (jnp.zeros(states.shape[1:], jnp.float32),) * 2
    _, d_given = jax.lax.scan(step, start, (gradient, drives, cells, real), reverse=True)
    d_recurrent = jnp.einsum("tbh,tbg->hg", states[:-1], d_given[1:])  # the state before the first time is 0
    return d_given, d_recurrent.astype(jnp.float32), None


_states.defvjp(_forward, _backward)


@jax.custom_vjp
def _unrolled_if_frozen(*given: jax.Array) -> jax.Array:
    """The same as `_looped`, of which no weights are trained here."""
    return _unrolled(*given)[0]


def _forward_if_frozen(*given: Any) -> tuple[jax.Array, Any]:
    values = tuple(each.value for each in given)
    _, *weights, _ = given
    if any(each.perturbed for each in weights):
        states, kept = jax.vjp(_looped, *values)
        return states, (kept, None)
    states, kept = _unrolled(*values)
    return states, (None, kept)


def _backward_if_frozen(kept: Any, gradient: Any) -> tuple[Any, ...]:
    of_all, of_inputs = kept
    whole: Any = gradient
    if isinstance(gradient, SymbolicZero):
        whole = jnp.zeros_like(whole)
    return of_all(whole) if of_all else (_unrolled_backward(of_inputs, whole), None, None, None, None)


_unrolled_if_frozen.defvjp(_forward_if_frozen, _backward_if_frozen, symbolic_zeros=True)


def _unrolled(
    inputs: jax.Array, weights: jax.Array, recurrent: jax.Array, bias: jax.Array, real: jax.Array
) -> tuple[jax.Array, Any]:
    """What is kept for the gradient stays apart for every time."""
    dtype = inputs.dtype
    both = jnp.concatenate([weights, recurrent.astype(dtype)])
    state = jnp.zeros((*inputs.shape[1:-1], len(recurrent)), dtype)
    cell, states, cells, drives = state.astype(jnp.float32), [], [], []
    for x, here in zip(inputs, real, strict=True):
        drives.append(jnp.concatenate([x, state], axis=-1) @ both + bias.astype(dtype))
        cells.append(cell.astype(dtype))
        state, cell = _after(drives[-1], state, cell, here)
        states.append(state)
    return jnp.stack(states), (drives, cells, real, both)


def _unrolled_backward(kept: Any, gradient: jax.Array) -> jax.Array:
    """The gradient of the inputs."""
    drives, cells, real, both = kept
    size = len(both) - cells[0].shape[-1]
    d_state, d_cell = (jnp.zeros(cells[0].shape, jnp.float32),) * 2
    d_inputs = []
    for now in zip(reversed(gradient), reversed(drives), reversed(cells), reversed(real), strict=True):
        d_gates, d_state, d_cell = _before(d_state, d_cell, *now)
        back = d_gates.astype(both.dtype) @ both.T
        d_inputs.append(back[..., :size])
        d_state = d_state + back[..., size:]
    return jnp.stack(d_inputs[::-1])


def _after(
    drive: jax.Array, state: jax.Array, cell: jax.Array, here: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """State and cell after a time."""
    i, f, o, g = _gates(drive, state.shape[-1])
    new_cell = f * cell + i * g
    new_state = (o * jnp.tanh(new_cell)).astype(state.dtype)
    return jnp.where(here, new_state, state), jnp.where(here, new_cell, cell)


def _before(
    d_state: jax.Array,
    d_cell: jax.Array,
    d_here: jax.Array,
    drive: jax.Array,
    cell: jax.Array,
    here: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of a time's gates, and of the state and cell before it, but for what comes to the state through
    the gates. `cell` is the one before; the one after is computed again, which is faster than reading it."""
    i, f, o, g = _gates(drive, cell.shape[-1])
    cell = cell.astype(jnp.float32)
    squashed = jnp.tanh(f * cell + i * g)
    d_state = d_state + d_here
    d_out = jnp.where(here, d_state, 0)
    d_new = jnp.where(here, d_cell, 0) + d_out * o * (1 - squashed * squashed)
    d_gates = [
        d_new * g * i * (1 - i),
        d_new * cell * f * (1 - f),
        d_out * squashed * o * (1 - o),
        d_new * i * (1 - g * g),
    ]
    d_state, d_cell = jnp.where(here, 0, d_state), d_new * f + jnp.where(here, 0, d_cell)
    return jnp.concatenate(d_gates, axis=-1), d_state, d_cell


def _gates(drive: jax.Array, units: int) -> tuple[jax.Array, ...]:
    """Input, forget and output gates and the candidate. They are computed from `drive` each time, not stored."""
    i, f, o, g = (drive[..., k * units : (k + 1) * units].astype(jnp.float32) for k in range(4))
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jax.nn.sigmoid(o), jnp.tanh(g)
