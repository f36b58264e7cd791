"""A personal model's prediction as ONNX, for onnxruntime and other systems. jax2onnx converts it.

The converter replaces functions of `jax.numpy` while it traces, and not all of them well. So the function is
traced by JAX alone first, and the converter is given only the primitive operations that the outputs need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.model.softmax import NOTHING
from partwise.runs.program import FIXED_ROWS, Program, Stages, any_rows, batch_shapes
from partwise.types import UserError

LARGEST = 2**31 - 2**20  # bytes: an ONNX file is one message of Protocol Buffers
CLOSE = 1e-5  # how far outputs may be from those of JAX, relative to the largest
TRIED_ROWS = (1, 5)


def to_onnx(program: Program, rows: int | None = None) -> Stages:
    """The program as ONNX, with the parameters in it, for any number of rows if the converter can do it.
    onnxruntime has computed the same outputs as JAX.

    Args:
        program: What `program_of` returned.
        rows: The number of rows, if it is to be fixed.
    """
    converter = _converter()
    if sum(leaf.nbytes for leaf in program.params.values()) > LARGEST:
        raise UserError(
            "the parameters take more than 2 GiB, which an ONNX file cannot hold: leave onnx out of --format"
        )
    problems = []
    for each in [rows] if rows else [None, FIXED_ROWS]:
        try:
            data = _converted(converter, program, each)
            return Stages(data, each, _checked(program, data, each))
        except Exception as error:  # the converter raises whatever goes wrong in it
            problems.append((str(error) or repr(error)).splitlines()[0])
    raise UserError(
        f"jax2onnx cannot convert this model ({problems[-1]}): leave onnx out of --format; the StableHLO of the "
        f"model is not affected"
    )


def _converter() -> Callable[..., Any]:
    try:
        from jax2onnx import to_onnx as convert  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"--format onnx needs a package that is not installed ({error.name}): pip install 'partwise[onnx]'"
        ) from None
    return convert


def _converted(converter: Callable[..., Any], program: Program, rows: int | None) -> bytes:
    names = list(program.columns)
    shapes = list(batch_shapes(program.columns, rows or any_rows()).values())
    params = {path: jnp.asarray(leaf) for path, leaf in program.params.items()}
    predict = lambda *columns: program.predict(params, dict(zip(names, columns, strict=True)))
    with _quiet():
        model = converter(
            _primitive(predict, shapes),
            shapes,
            input_names=names,
            output_names=["output"],
            model_name="partwise",
        )
    return model.SerializeToString()


def _primitive(predict: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct]) -> Callable[..., Any]:
    """The function as primitive operations, without those that the outputs do not need."""
    from jax.extend.core import jaxpr_as_fun
    from jax.interpreters.partial_eval import dce_jaxpr

    traced = jax.make_jaxpr(predict)(*shapes)
    jaxpr, _ = dce_jaxpr(traced.jaxpr, [True], instantiate=True)
    run = jaxpr_as_fun(traced.replace(jaxpr=jaxpr))
    return lambda *columns: run(*columns)[0]


def _checked(program: Program, data: bytes, rows: int | None) -> jax.ShapeDtypeStruct:
    """Compare onnxruntime with JAX on random rows. Returns the shape of one row's output."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    expected = np.empty(0)
    for count in [rows] if rows else TRIED_ROWS:
        columns = _random(program, count)
        expected = np.asarray(jax.jit(program.predict)(program.params, columns))
        (found,) = session.run(None, columns)
        if found.shape != expected.shape or not distance(found, expected) <= CLOSE:  # or not a number
            raise ValueError("onnxruntime computes other outputs than JAX")
    return jax.ShapeDtypeStruct(expected.shape[1:], expected.dtype)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest output (or to 1). Where the expected output is `NOTHING`,
    relative to that."""
    size = np.abs(expected)
    scores = size < -NOTHING / 2
    scale = np.where(scores, size.max(initial=1.0, where=scores), size)
    return float((np.abs(found - expected) / scale).max(initial=0.0))


def _random(program: Program, rows: int) -> dict[str, np.ndarray]:
    """Rows of random ids, some of them missing in lists, and of numbers that are 0 or 1."""
    rng, columns = np.random.default_rng(0), {}
    for name, each in batch_shapes(program.columns, rows).items():
        low = -1 if name in program.num_ids and len(each.shape) > 1 else 0
        columns[name] = rng.integers(low, program.num_ids.get(name, 2), each.shape).astype(each.dtype)
    return columns


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the converter's warnings about its own graph."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
