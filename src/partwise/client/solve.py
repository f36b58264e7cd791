"""Closed form: the minimum of a loss that is quadratic in some groups of parameters.

Least squares has a gradient that is linear in these parameters, g(x) = g(x0) + H (x - x0). How the model
depends on its other parameters does not matter. So one exact step, x0 - H^-1 g(x0), ends at the minimum. H
and g are sums over the client's batches. For few parameters (a user's vector), H itself is built and
factored. For many (a client's slice of a table), the same system is solved by conjugate gradients, with
products H v and without H, until what is left of the gradient is next to nothing. If it is not after many steps,
the result is not a number, so that the client is recorded as broken.

This is the patent's reconstruction "in closed form", and both halves of its alternating minimisation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from partwise import tree
from partwise.client.batches import Batches, Drawn, draw, over_batches
from partwise.client.split import Subset, everything
from partwise.client.state import (
    Client,
    Group,
    Progress,
    anchor,
    batch_loss,
    begin,
    get_parts,
    put_parts,
    read,
    with_deltas,
)
from partwise.metrics import Sums, add_sums, zero_sums
from partwise.randomness import child
from partwise.types import UserError

MOST_DENSE = 512  # parameters up to which H is built
RESIDUAL = 1e-6  # of the gradient, at which conjugate gradients stop
ACCEPTED = 1e-3  # of the gradient, if that much is left after all steps
STEPS = 2  # for each parameter; without rounding, 1 would do
RESTARTS = 3  # from the gradient itself, because rounding errors add up in what steps carry along
RIDGE = 1e-4  # relative to the mean eigenvalue: a thousand times the rounding error


def solve(
    client: Client, progress: Progress, subset: Subset, groups: tuple[Group, ...], pull: Any, batch_size: int
) -> Progress:
    """Minimise (sum of losses over the subset) + pull * |x - anchor|^2 over the named groups.

    The anchor is what was received. For local leaves it is the learned default, or zero. Up to `MOST_DENSE`
    parameters, the pull is at least a thousand times the rounding error. With more, the result is not finite if the
    minimum is not found.
    """
    if "keyed" in groups:
        progress = with_deltas(client, progress)
    x0, rebuild = raveled(progress, groups)
    if x0.size == 0:
        return progress
    offset = x0 - raveled(anchor(client, progress), groups)[0]
    place = lambda x: put_parts(progress, rebuild(x))
    summed = lambda of, zero, size=batch_size: _summed(client, place, subset, size, of, zero)
    if x0.size <= MOST_DENSE:
        zero = (jnp.zeros_like(x0), jnp.zeros((x0.size, x0.size), x0.dtype))
        g, H = summed(lambda f: (jax.grad(f)(x0), _second_derivative(f, x0)), zero)
        step = solve_positive(_pulled(H, pull), g + 2 * pull * offset)
    else:
        g = summed(lambda f: jax.grad(f)(x0), jnp.zeros_like(x0))
        along = lambda f, v: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x0)
        product = lambda v: summed(lambda f: along(f, v), jnp.zeros_like(x0)) + 2 * pull * v
        diagonal = summed(partial(_diagonal, along, x0), jnp.zeros_like(x0), 1) + 2 * pull
        step = solve_by_products(product, diagonal, g + 2 * pull * offset, _tolerance(client))
    return place(x0 - step)


def _diagonal(along: Callable[..., jax.Array], x0: jax.Array, f: Callable[..., jax.Array]) -> jax.Array:
    """The diagonal of the second derivatives of one example's loss. If they are a a', as for one squared residual,
    then of any v, (a a' v)^2 / (v' a a' v) = a^2. If they are a sum of these, this is a part of the diagonal."""
    v = jax.random.normal(jax.random.key(0), x0.shape, x0.dtype)
    found = along(f, v)
    size = jnp.vdot(v, found)
    return jnp.where(size > 0, found**2 / jnp.where(size > 0, size, 1), 0)


def solve_by_products(
    product: Callable[[jax.Array], jax.Array],
    diagonal: jax.Array,
    vector: jax.Array,
    accepted: Any = ACCEPTED,
) -> jax.Array:
    """matrix^-1 vector for a symmetric positive (semi)definite matrix that is known by its products, by conjugate
    gradients. NaN if more than the share `accepted` of the vector is left.

    Args:
        product: v -> matrix v.
        diagonal: About that of the matrix; by its root, parameters are brought to one scale.
        vector: It must be in the range of the matrix, as a gradient is.
        accepted: A share of the vector's length, both in parameters of one scale.
    """
    scale = jnp.where(diagonal > 0, 1 / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1)), 1)
    scaled, target = lambda y: scale * product(scale * y), scale * vector
    length = jnp.vdot(target, target)

    def step(carry: Any) -> Any:
        y, left, way, size, number = carry
        curved = scaled(way)
        far = size / jnp.vdot(way, curved)
        left, before = left - far * curved, size
        size = jnp.vdot(left, left)
        return y + far * way, left, left + size / before * way, size, number + 1

    def descend(_: Any, y: jax.Array) -> jax.Array:
        left = target - scaled(y)
        begin = (y, left, left, jnp.vdot(left, left), 0)
        going = lambda carry: (carry[3] > RESIDUAL**2 * length) & (carry[4] < STEPS * vector.size)
        return jax.lax.while_loop(going, step, begin)[0]

    y = jax.lax.fori_loop(0, RESTARTS, descend, jnp.zeros_like(vector))
    left = target - scaled(y)
    return jnp.where(jnp.vdot(left, left) <= accepted**2 * length, scale * y, jnp.nan)


def curvature(client: Client, progress: Progress, subset: Subset, pull: Any, batch_size: int) -> jax.Array:
    """H of the local part, with the pull: the matrix with which `solve` finds it."""
    x0, rebuild = raveled(progress, ("local",))
    if x0.size > MOST_DENSE:
        raise UserError(
            f"the update through the reconstruction builds a matrix of the local part, which has {x0.size} numbers "
            f"and may have {MOST_DENSE}: use update.method = steps"
        )
    place = lambda x: put_parts(progress, rebuild(x))
    zero = jnp.zeros((x0.size, x0.size), x0.dtype)
    return _pulled(
        _summed(client, place, subset, batch_size, lambda f: _second_derivative(f, x0), zero), pull
    )


def _second_derivative(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """The matrix of second derivatives of f at x. It is faster with a derivative forwards, which some functions do
    not have: sums of rows (`model.spec.bag`), and whatever else has a gradient of its own (`jax.custom_vjp`)."""
    try:
        return jax.hessian(f)(x)
    except TypeError:
        return jax.jacrev(jax.grad(f))(x)


def _summed(
    client: Client,
    place: Callable[[jax.Array], Progress],
    subset: Subset,
    batch_size: int,
    of: Callable[[Callable[[jax.Array], jax.Array]], Any],
    zero: Any,
) -> Any:
    """The sum over batches of `of(loss of that batch as a function of x)`."""

    def body(i: jax.Array, drawn: Drawn, carry: Any) -> Any:
        value = of(lambda x: _total_loss(client, place(x), drawn))
        return jax.tree_util.tree_map(lambda a, b: a + jnp.where(drawn.mask.any(), b, 0), carry, value)

    return over_batches(body, zero, client.examples, subset, Batches(batch_size))


def _pulled(H: jax.Array, pull: Any) -> jax.Array:
    return H + jnp.maximum(2 * pull, _ridge(H)) * jnp.eye(len(H), dtype=H.dtype)


def raveled(progress: Progress, groups: tuple[Group, ...]) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The groups as one vector, and the function back to groups. 16-bit numbers are solved for in 32 bits."""
    x, rebuild = ravel_pytree(get_parts(progress, groups))
    return x.astype(tree.wide(x)), lambda wide: rebuild(wide.astype(x.dtype))


def _ridge(H: jax.Array) -> jax.Array:
    """A small number, relative to the scale of H, that makes H invertible in 32 bits. If the examples say
    nothing about a direction (fewer examples than parameters, and no pull), there is then no step in this
    direction."""
    scale = jnp.mean(jnp.diagonal(H))
    return jnp.where(scale > 0, RIDGE * scale, 1.0)


def solve_positive(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """matrix^-1 vector for a symmetric positive definite matrix, by elimination (which needs no pivoting for
    such a matrix).

    LAPACK is not used. Its batched calls wait for threads of the same pool that the CPU devices run on. Two
    devices that do this at the same time wait forever.
    """
    size = vector.shape[0]

    def eliminate(k: jax.Array, table: jax.Array) -> jax.Array:
        row = table[k] / table[k, k]
        return jnp.where(jnp.arange(size)[:, None] == k, row, table - table[:, k, None] * row)

    table = jnp.concatenate([matrix, vector[:, None]], axis=1)
    return jax.lax.fori_loop(0, size, eliminate, table)[:, -1]


def loss_of(client: Client, progress: Progress, subset: Subset, batch_size: int) -> Sums:
    """The loss of a subset, as sums."""
    add = lambda i, drawn, total: add_sums(total, _loss(client, progress, drawn))
    return over_batches(add, zero_sums(), client.examples, subset, Batches(batch_size))


def _total_loss(client: Client, progress: Progress, drawn: Drawn) -> jax.Array:
    return _loss(client, progress, drawn).value


def _loss(client: Client, progress: Progress, drawn: Drawn) -> Sums:
    rows, need = read(client, progress, drawn)
    return batch_loss(client, progress, rows, need.batch, need.mask, child(client.rng, "solve"))[1]


def check_quadratic(client: Client, groups: tuple[Group, ...]) -> None:
    """Raise `UserError` unless the loss of this client's first examples is quadratic in the groups."""

    def departure() -> jax.Array:
        progress = with_deltas(client, begin(client)) if "keyed" in groups else begin(client)
        x0, rebuild = raveled(progress, groups)
        drawn = draw(client.examples, everything, Batches(32), jnp.zeros((), int))
        loss = lambda x: _total_loss(client, put_parts(progress, rebuild(x)), drawn)
        v = jax.random.normal(child(client.rng, "check"), x0.shape)
        gradient = jax.grad(loss)  # not the second derivative: a loss without one must get the message below
        change = gradient(x0 + v) - gradient(x0)
        linear = (gradient(x0 + 2 * v) - gradient(x0)) / 2
        return jnp.linalg.norm(change - linear) / (jnp.linalg.norm(change) + 1e-12)

    error = jax.jit(departure)()  # one program, because without jit each operation is compiled separately
    if not error < _tolerance(client):
        raise UserError(
            f"the closed form needs a loss that is least squares in the {' and '.join(groups)} part, but this "
            f"loss is not: its gradient departs from a straight line by {float(error):.2g} of its length. Use "
            f"gradient steps."
        )


def _tolerance(client: Client) -> float:
    """How exact gradients are: some times the rounding error of the model's least precise type of parameters."""
    types = [leaf.dtype for leaf in client.partition.shapes.values()]
    least = max(float(jnp.finfo(each).eps) for each in types if jnp.issubdtype(each, jnp.floating))
    return max(ACCEPTED, 8 * least)
