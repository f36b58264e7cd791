"""A Keras 3 model as a partwise model: its weights are leaves, by their paths (`dense/kernel`).

Keras refuses a weight whose shape is not the shape it was built with, but clients are sent slices. So a model
is given as a function that builds it. The function takes the numbers of rows that may be cut. It is called
once for every size of slice. Dropout and other layers that draw random numbers get the randomness of the
step. Penalties of regularizers are added to the training loss. Weights that Keras does not train do not
change, except the statistics that a layer updates in training.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.model.adapt import (
    Inputs,
    arguments,
    begin_at,
    calling,
    check_functions,
    check_values,
    following,
    full_precision,
    losses_of,
    real_rows,
    shown,
)
from partwise.model.spec import Batch, Metric, Model, Pooled, one_per_example
from partwise.types import UserError

HOW = (
    "write `import os; os.environ['KERAS_BACKEND'] = 'jax'` at the top of the program, before the first `import "
    "keras`, and start Python (or the notebook) anew"
)
if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")
try:
    import keras
except ImportError as error:  # without the extra, or with a backend that is not installed
    raise UserError(f"Keras cannot be imported ({error}): pip install 'partwise[keras]', and {HOW}") from None

if keras.backend.backend() != "jax":
    raise UserError(f"Keras runs on '{keras.backend.backend()}', and partwise needs it on JAX: {HOW}")


class Built(NamedTuple):
    """A Keras model, built for some numbers of rows."""

    model: Any
    weights: list[Any]  # in the order of the paths
    seeds: list[Any]  # the states of its random number generators
    starts: list[Callable[[jax.Array], Any]]  # rng -> initial value, of every weight


def keras_model(
    build: Callable[..., Any],
    loss: Callable[[jax.Array, Batch], jax.Array],
    metrics: Mapping[str, Metric | Pooled] | None = None,
    *,
    rows: Mapping[str, int] | None = None,
    inputs: Inputs = None,
    weight: Callable[[Batch], jax.Array] = one_per_example,
) -> Model:
    """A model from a function that builds a Keras model.

    Args:
        build: The function. It must return a new model at every call.
        loss: (outputs, batch) -> one value for every example.
        metrics: {name: metric}.
        rows: The arguments of `build` that are the number of rows of a keyed weight, with their full values:
            rows={"num_items": 3706} calls build(num_items=...).
        inputs: What the model is called with: a column, several columns, or a function of the batch (default:
            the batch, by the names of its inputs).
        weight: batch -> the weight of each example.

    Returns:
        A model. Weights that `build` sets or loads are the initial values of training. Other weights start as
            their initializers say, with the seed of the run. Give names to layers that rules should match.
            Layers without a name are numbered as if this were the first model of the process.
    """
    metrics, whole = check_functions(loss, metrics, weight, inputs), _check_rows(rows)
    _check_build(build, whole, loss)
    cached = functools.cache(lambda *sizes: _built(build, dict(zip(whole, sizes, strict=True))))
    full = cached(*whole.values())
    paths = _paths(full, _built(build, whole))
    check_values(dict(zip(paths, full.weights, strict=True)), "Keras model")
    size_from = {name: _size_from(build, whole, name, paths, full) for name in whole}

    def init(rng: jax.Array) -> dict[str, Any]:
        keys = [jax.random.fold_in(rng, i) for i in range(len(paths))]
        return {path: start(key) for path, start, key in zip(paths, full.starts, keys, strict=True)}

    def call(
        values: Mapping[str, Any], batch: Batch, rng: jax.Array, training: bool
    ) -> tuple[Any, Any, dict]:
        """(outputs, penalties, statistics that were updated)"""
        built = cached(*(size(values) for size in size_from.values()))
        _check_shapes(values, paths, built, whole)
        held = [
            v if w.trainable else jax.lax.stop_gradient(v)
            for w, v in zip(built.weights, _in_order(values, paths), strict=True)
        ]
        bits = [
            jax.random.bits(jax.random.fold_in(rng, i), s.shape, s.dtype) for i, s in enumerate(built.seeds)
        ]
        mapping = [*zip(built.weights, held, strict=True), *zip(built.seeds, bits, strict=True)]
        given = arguments(inputs, batch)
        stateless = keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False)
        with calling(batch), stateless as scope:
            before = [scope.get_current_value(w) for w in built.weights]
            outputs = built.model(given[0] if len(given) == 1 else list(given), training=training)
            penalty = sum(built.model.losses, jnp.zeros(()))
            after = [scope.get_current_value(w) for w in built.weights]
        moved = {p: new for p, old, new in zip(paths, before, after, strict=True) if new is not old}
        return full_precision(outputs), penalty, moved

    def training(values: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        outputs, penalty, moved = call(values, batch, rng, True)
        return losses_of(loss, outputs, batch) + weight(batch) * (penalty + following(values, moved))

    predict = lambda values, batch, rng: call(values, batch, rng, False)[0]
    return Model(
        init, predict, loss, metrics, weight, training, lambda values: _with(build, whole, paths, values)
    )


def _with(
    build: Callable[..., Any], sizes: Mapping[str, int], paths: list[str], values: Mapping[str, Any]
) -> Any:
    """A new Keras model with these weights."""
    model = _call(build, sizes)
    for path, weight in zip(paths, model.weights, strict=True):
        weight.assign(values[path])
    return model


def _built(build: Callable[..., Any], sizes: Mapping[str, int]) -> Built:
    """Build the model, perhaps during a compilation. In a stateless scope, Keras tells the initial value of
    each weight, and keeps the values that `build` sets. Weights have no values of their own, so JAX need not
    start."""
    with jax.ensure_compile_time_eval(), keras.StatelessScope(initialize_variables=False) as scope:
        model = _call(build, sizes)
        _check_built(model, sizes, scope)
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.momentum = 0.0  # after a call, its statistics are those of the batch's examples
                layer._moments = _of_examples(layer, layer._moments)
        weights = model.weights
        among = {id(w) for w in weights}
        seeds = [v for v in model.variables if id(v) not in among and v.dtype == "uint32"]
        return Built(model, weights, seeds, [_start(w, scope.get_current_value(w)) for w in weights])


def _of_examples(layer: Any, moments: Callable[..., Any]) -> Callable[..., Any]:
    """Mean and variance of a layer's input, without the rows that only fill up the batch."""

    def found(inputs: Any, mask: Any) -> Any:
        rows = real_rows(inputs) if mask is None else None
        if rows is None:
            return moments(inputs, mask)
        axes = tuple(layer._reduction_axes)
        return jnp.mean(inputs, axes, where=rows), jnp.var(inputs, axes, where=rows)

    return found


def _check_rows(rows: Any) -> dict[str, int]:
    wrong = "rows names the arguments of `build` that are numbers of rows, as in rows={'num_items': 3706}"
    if not isinstance(rows or {}, Mapping):
        raise UserError(f"{wrong}, not {rows!r}")
    for name, size in (rows or {}).items():
        if not isinstance(size, int) or size < 1:
            raise UserError(f"{wrong}; '{name}' is {size!r}, and must be a whole number from 1 on")
    return dict(rows or {})


def _check_build(build: Any, whole: Mapping[str, int], loss: Any) -> None:
    if isinstance(build, keras.Model):
        raise UserError(
            f"this is a model, '{build.name}', and a function that builds it is needed (clients hold slices, so it "
            f"is built in several sizes): def build(num_items): ... return model. {COPY}"
        )
    if not callable(build):
        raise UserError(f"this is {shown(build)}: give a function that builds a keras.Model")
    if isinstance(loss, keras.losses.Loss):
        kind = type(loss).__name__
        raise UserError(
            f"the loss is Keras' {kind}, which takes labels first and may be a mean: write lambda outputs, batch: "
            f"f(batch['label'], outputs), with f = keras.losses.{kind}(reduction=None)"
        )
    try:
        inspect.signature(build).bind(**whole)
    except TypeError as error:
        raise UserError(
            f"{_told(whole)} does not fit the function that was given: {error}. rows= names its arguments that are "
            f"numbers of rows; others need a default, or a lambda around it"
        ) from None


COPY = (
    "Of one that was trained already: def build(): copy = keras.models.clone_model(model); "
    "copy.set_weights(model.get_weights()); return copy"
)


def _told(sizes: Mapping[str, int]) -> str:
    return f"build({', '.join(f'{name}={size}' for name, size in sizes.items())})"


def _call(build: Callable[..., Any], sizes: Mapping[str, int]) -> Any:
    try:
        return build(**sizes)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        raise UserError(
            f"{_told(sizes)} failed ({why}). It is called for every size of slice, so it must work for any number "
            f"of rows from 1 on, and must not compile the model (load_model(..., compile=False))"
        ) from error


def _check_built(model: Any, sizes: Mapping[str, int], scope: Any) -> None:
    if not (isinstance(model, keras.Model) and model.built):
        given = "a model without weights yet" if isinstance(model, keras.Model) else shown(model)
        raise UserError(
            f"{_told(sizes)} gave {given}: it must give a keras.Model that is built (one with a keras.Input, or "
            f"that was called once)"
        )
    for weight in model.weights:
        if weight._initializer is None and scope.get_current_value(weight) is None:
            raise UserError(
                f"{_told(sizes)} gave a model that was there before, and must build a new one every time. {COPY}"
            )


def _check_shapes(
    values: Mapping[str, Any], paths: list[str], built: Built, whole: Mapping[str, int]
) -> None:
    for path, weight in zip(paths, built.weights, strict=True):
        if tuple(values[path].shape) != tuple(weight.shape):
            here, made = tuple(values[path].shape), tuple(weight.shape)
            raise UserError(
                f"'{path}' is keyed, so clients hold slices of it: this one has shape {here}, and the function "
                f"that builds the model makes it {made}. Let it take that number of rows, and name the argument in "
                f"rows, as in rows={{'num_items': {made[0]}}}{f' beside {shown(dict(whole))}' if whole else ''}"
            )


def _start(variable: Any, assigned: Any) -> Callable[[jax.Array], Any]:
    if assigned is not None:
        return lambda rng: begin_at(assigned)
    initializer, shape, dtype = variable._initializer, variable.shape, variable.dtype

    def start(rng: jax.Array) -> Any:
        own = initializer
        if hasattr(initializer, "seed"):
            own = copy.copy(initializer)
            own.seed = rng
        return jnp.asarray(own(shape, dtype=dtype))

    return start


def _in_order(values: Mapping[str, Any], paths: list[str]) -> list[Any]:
    return [values[path] for path in paths]


def _paths(first: Built, second: Built) -> list[str]:
    """The weights' paths, without the model's own name. Names that differ between two builds were invented by
    Keras, which counts all layers of a process. Such names are numbered again."""
    split = lambda built: [w.path.removeprefix(f"{built.model.name}/").split("/") for w in built.weights]
    ours, theirs = split(first), split(second)
    explicit = {
        a for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True) if a == b
    }
    names: dict[str, str] = {}

    def name(here: str, there: str) -> str:
        if here == there or here in names:
            return names.get(here, here)
        base, number = re.sub(r"_\d+$", "", here), 0
        taken = explicit | set(names.values())
        while (free := f"{base}_{number}" if number else base) in taken:
            number += 1
        names[here] = free
        return free

    pairs = zip(ours, theirs, strict=True)
    return ["/".join(name(a, b) for a, b in zip(one, other, strict=True)) for one, other in pairs]


def _size_from(
    build: Callable[..., Any], whole: Mapping[str, int], name: str, paths: list[str], full: Built
) -> Callable[[Mapping[str, Any]], int]:
    """How to read an argument of `build` from the shapes of weights: the length of the first axis that
    follows it."""
    one, two = (_built(build, dict.fromkeys(whole, 1) | {name: size}) for size in (1, 2))
    for path, small, large, real in zip(paths, one.weights, two.weights, full.weights, strict=True):
        for axis, lengths in enumerate(zip(small.shape, large.shape, real.shape, strict=True)):
            if lengths == (1, 2, whole[name]):
                return lambda values: values[path].shape[axis]
    raise UserError(
        f"rows={{'{name}': {whole[name]}}}: no weight of the model has that many rows, so '{name}' cannot be read "
        f"off a slice: `build` must make a weight with as many rows (or columns) as it is told"
    )
