"""Long short-term memory (Hochreiter and Schmidhuber, 1997) as plain functions, made for small batches in loops.

What need not wait for the state is done for all times at once: the product of the inputs, and in the gradient the
products that make up the weights' own, which automatic differentiation would add up step by step. The loops over
time are not unrolled: on a CPU that is slower and takes much longer to compile.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def init_lstm(rng: jax.Array, size: int, units: int) -> dict[str, jax.Array]:
    """Weights Glorot-uniform over input and state together, biases 0, that of the forget gate 1: what TensorFlow's
    cell does, and LEAF with it. Gates lie side by side: input, forget, output, candidate."""
    weights = jax.nn.initializers.glorot_uniform()(rng, (size + units, 4 * units))
    return {
        "input": weights[:size],
        "recurrent": weights[size:],
        "bias": jnp.zeros(4 * units).at[units : 2 * units].set(1.0),
    }


def lstm(params: dict[str, jax.Array], inputs: jax.Array, real: jax.Array) -> jax.Array:
    """The states after every time, [T, B, units], of inputs [T, B, size]; where not `real` [T, B], a state stays as
    it is. So the last one is that after the last real input, wherever the padding is."""
    given = inputs @ params["input"] + params["bias"]
    return _states(given, params["recurrent"], real[..., None].astype(given.dtype))


@jax.custom_vjp
def _states(given: jax.Array, recurrent: jax.Array, real: jax.Array) -> jax.Array:
    return _forward(given, recurrent, real)[0]


def _forward(given: jax.Array, recurrent: jax.Array, real: jax.Array) -> tuple[jax.Array, Any]:
    units = recurrent.shape[0]

    def step(carry: Any, now: Any) -> Any:
        state, cell = carry
        drive, mask = now
        gates = _gates(drive + state @ recurrent, units)
        i, f, o, g = _four(gates, units)
        new_cell = f * cell + i * g
        after = (state + mask * (o * jnp.tanh(new_cell) - state), cell + mask * (new_cell - cell))
        return after, (*after, gates)

    start = (jnp.zeros_like(given[0, :, :units]),) * 2
    _, (states, cells, gates) = jax.lax.scan(step, start, (given, real))
    return states, (states, cells, gates, recurrent, real)


def _backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    states, cells, gates, recurrent, real = kept
    units = recurrent.shape[0]
    before = lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])

    def step(carry: Any, now: Any) -> Any:
        d_state, d_cell = carry
        d_here, gate, cell, earlier, mask = now
        i, f, o, g = _four(gate, units)
        d_state = d_state + d_here
        squashed = jnp.tanh(cell)  # where not real, of another cell, but then its gradient is 0
        d_out = mask * d_state
        d_new = mask * d_cell + d_out * o * (1 - squashed * squashed)
        d_gates = jnp.concatenate(
            [
                d_new * g * i * (1 - i),
                d_new * earlier * f * (1 - f),
                d_out * squashed * o * (1 - o),
                d_new * i * (1 - g * g),
            ],
            axis=-1,
        )
        carry = (d_gates @ recurrent.T + (1 - mask) * d_state, d_new * f + (1 - mask) * d_cell)
        return carry, d_gates

    start = (jnp.zeros_like(states[0]),) * 2
    given = (gradient, gates, cells, before(cells), real)
    _, d_given = jax.lax.scan(step, start, given, reverse=True)
    d_recurrent = jnp.einsum("tbh,tbg->hg", before(states), d_given)
    return d_given, d_recurrent, None


_states.defvjp(_forward, _backward)


def _gates(drive: jax.Array, units: int) -> jax.Array:
    return jnp.concatenate(
        [jax.nn.sigmoid(drive[..., : 3 * units]), jnp.tanh(drive[..., 3 * units :])], axis=-1
    )


def _four(gates: jax.Array, units: int) -> list[jax.Array]:
    return [gates[..., k * units : (k + 1) * units] for k in range(4)]
