"""A PyTorch module as a partwise model: torchax runs the module's own code on JAX arrays.

Parameters and floating-point buffers are leaves, by their names with slashes (`embed/weight`). Random numbers
come from the step. torchax does not write running statistics back. So the statistics of batches are computed
from the input of the normalisation layers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.model.adapt import (
    Inputs,
    Statistics,
    arguments,
    begin_at,
    calling,
    check_functions,
    check_statistics,
    check_values,
    following,
    full_precision,
    losses_of,
    real_rows,
    shown,
)
from partwise.model.spec import Batch, Metric, Model, Pooled, one_per_example
from partwise.types import UserError

try:
    import torch  # pyright: ignore[reportMissingImports]
except ImportError:  # pragma: no cover - without the extra
    raise UserError("PyTorch is not installed: pip install 'partwise[torch]' (see docs/torch.md)") from None


def torch_model(
    module: Any,
    loss: Callable[[jax.Array, Batch], jax.Array],
    metrics: Mapping[str, Metric | Pooled] | None = None,
    *,
    inputs: Inputs = None,
    weight: Callable[[Batch], jax.Array] = one_per_example,
    statistics: Statistics = "batch",
) -> Model:
    """A model from a PyTorch module, with torchax.

    Args:
        module: A `torch.nn.Module`. Its values are the initial values of training, for every seed of the run.
        loss: (outputs, batch) -> one value for every example, on JAX arrays.
        metrics: {name: metric}, on JAX arrays.
        inputs: What the module is called with: a column, several columns, or a function of the batch
            (default: the batch, a dict of tensors).
        weight: batch -> the weight of each example.
        statistics: In training, use the statistics of the batch ("batch"), or the module's own, which then
            never change ("fixed").

    Returns:
        A model. Tables may be cut: PyTorch takes sizes from the arrays.
    """
    _check_module(module, loss)
    fixed, metrics = check_statistics(statistics), check_functions(loss, metrics, weight, inputs)
    _import_torchax()
    module = copy.deepcopy(module).to("cpu")
    named = {name.replace(".", "/"): t for name, t in (*module.named_parameters(), *module.named_buffers())}
    start = {path: t.detach().numpy() for path, t in named.items()}  # no JAX arrays: they would start JAX
    constants = {path: x for path, x in start.items() if not jnp.issubdtype(x.dtype, jnp.floating)}
    start = {path: x for path, x in start.items() if path not in constants}
    trained = {path for path in start if named[path].requires_grad}
    check_values(start, "module")

    def call(values: Mapping[str, Any], batch: Batch, rng: jax.Array, training: bool) -> tuple[Any, dict]:
        """(outputs, statistics of the batch)"""
        held = {path: x if path in trained else jax.lax.stop_gradient(x) for path, x in values.items()}
        names = {path.replace("/", "."): jnp.asarray(x) for path, x in (held | constants).items()}
        module.train(training)
        env = _environment()
        normalising = _normalising(module, training and not fixed, env)
        with calling(batch), normalising as seen, env, env.override_property(prng=rng):
            outputs = torch.func.functional_call(module, *env.j2t_iso((names, arguments(inputs, batch))))
        return full_precision(env.t2j_iso(outputs)), env.t2j_iso(seen)

    def training(values: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        outputs, moved = call(values, batch, rng, True)
        return losses_of(loss, outputs, batch) + weight(batch) * following(values, moved)

    predict = lambda values, batch, rng: call(values, batch, rng, False)[0]
    make = lambda values: _with(module, values)
    return Model(lambda rng: begin_at(start), predict, loss, metrics, weight, training, make)


def _with(module: Any, values: Mapping[str, Any]) -> Any:
    """A copy of the module with these values, for use."""
    state = {path.replace("/", "."): torch.from_numpy(np.array(leaf)) for path, leaf in values.items()}
    own = copy.deepcopy(module).eval()
    own.load_state_dict(state, strict=False)  # constants stay, and tied weights come once
    return own


def _check_module(module: Any, loss: Any) -> None:
    if isinstance(module, type) and issubclass(module, torch.nn.Module):
        raise UserError(f"this is the class {module.__name__}: give a module of it, {module.__name__}(...)")
    if not isinstance(module, torch.nn.Module):
        raise UserError(
            f"this is {shown(module)}: give a torch.nn.Module (if it is a function, what it returns)"
        )
    if isinstance(loss, torch.nn.Module):
        raise UserError(
            f"the loss is PyTorch's {type(loss).__name__}, and losses are of JAX arrays here, with one value for "
            f"every example: lambda outputs, batch: jnp.square(outputs - batch['rating']), or one of optax"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            raise UserError(
                f"'{name}' of this module holds {tensor.dtype}, and parameters are float32: give module.float(), "
                f"and cast in `forward` where 16 bits are enough"
            )


@contextmanager
def _normalising(module: Any, by_batch: bool, env: Any) -> Iterator[dict[str, Any]]:
    """With `by_batch`, batch normalisation layers use the statistics of the batch's examples, which are collected
    by path. Otherwise they use their own."""
    seen: dict[str, Any] = {}

    def by_examples(path: str) -> Callable[[Any, Any, Any], Any]:
        def hook(layer: Any, given: Any, own: Any) -> Any:
            mean, variance, number = _moments(given[0], env)
            seen[f"{path}running_mean"] = mean
            seen[f"{path}running_var"] = variance * (number / (number - 1))  # as PyTorch's running one
            wide = lambda x: x.reshape(1, -1, *[1] * (given[0].dim() - 2))
            out = (given[0] - wide(mean)) * torch.rsqrt(wide(variance) + layer.eps)
            return out * wide(layer.weight) + wide(layer.bias) if layer.affine else out

        return hook

    handles = []
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and layer.track_running_stats:
            layer.train(False)  # what it returns is replaced by the hook
            if by_batch:
                path = f"{name.replace('.', '/')}/" if name else ""
                handles.append(layer.register_forward_hook(by_examples(path)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _moments(x: Any, env: Any) -> tuple[Any, Any, Any]:
    """Mean and variance of every channel (axis 1) over the batch's examples, and over how many values."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    rows = real_rows(x)
    rows = torch.ones_like(x) if rows is None else torch.ones_like(x) * env.j2t_iso(rows.astype(jnp.float32))
    number = rows.sum(dim=axes)
    mean = (x * rows).sum(dim=axes) / number
    apart = (x - mean.reshape(1, -1, *[1] * (x.dim() - 2))) * rows
    return mean, (apart * apart).sum(dim=axes) / number, number


@contextmanager
def _operators_named() -> Iterator[None]:
    """A workaround for importing torchax. Up to 0.0.13, torchax names operators on named tensors, which
    PyTorch 2.13 no longer has. It never calls them, so during the import a name is enough."""
    packet: Any = torch._ops.OpOverloadPacket
    find = packet.__getattr__

    def find_or_name(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            if "name" not in name.lower() or name.startswith("__"):
                raise
            return f"{self}.{name}"

    packet.__getattr__ = find_or_name
    try:
        yield
    finally:
        packet.__getattr__ = find


def _import_torchax() -> Any:
    try:
        with _operators_named():
            import torchax  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "torchax is not installed: pip install 'partwise[torch]' (see docs/torch.md)"
        ) from None
    return torchax


@functools.cache
def _environment() -> Any:
    """The environment of torchax. It makes a random key, which starts JAX. So it is made when the module is
    first called."""
    with _operators_named(), jax.ensure_compile_time_eval():
        return _import_torchax().default_env()
