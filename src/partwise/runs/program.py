"""A personal model's prediction as one function of arrays, and as StableHLO, which runs without partwise.

The function is that of `Device.predict` for a client that was sent all keys: its ids are rows of the whole
tables. It takes the parameters beside the columns, so the program holds no value of the model.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as stages

from partwise.device import Given
from partwise.randomness import client_numbers, words
from partwise.runs.client_file import NOBODY
from partwise.runs.personal import Personal
from partwise.server.messages import read_slices, send
from partwise.types import UserError

SERVER, LOCAL = "server/", "local/"  # a twin has the same path in both
PLATFORMS = ("cpu", "cuda", "tpu")
PLACES = "jax_traceback_in_locations_limit"
FIXED_ROWS = 64  # of a program that needs a number of rows, if none was asked for

Arrays = Mapping[str, Any]
Shapes = Mapping[str, jax.ShapeDtypeStruct]


class Program(NamedTuple):
    """A prediction: `predict(params, columns)` gives the outputs, whose first axis is the row."""

    predict: Callable[[Arrays, Arrays], jax.Array]
    params: Mapping[str, np.ndarray]
    columns: Shapes  # of one row
    num_ids: Mapping[str, int]  # of the columns with ids


class Stages(NamedTuple):
    """A program for other systems."""

    data: bytes
    rows: int | None  # None: any number
    output: jax.ShapeDtypeStruct  # of one row


def program_of(personal: Personal, local: Arrays) -> Program:
    """The prediction for one client, with the parameters and columns that it reads and no others."""
    partition = personal.setting.partition
    keys = {space: np.arange(count) for space, count in partition.all_keys.items()}
    sent = read_slices(partition, send(partition, personal.params, keys, personal.rng), keys)
    named = {name for names in partition.columns.values() for name in names}

    def predict(params: Arrays, columns: Arrays) -> jax.Array:
        given = Given(
            tables=_under(SERVER, params),
            columns={name: column for name, column in columns.items() if name not in named},
            positions={name: columns[name] for name in named},
            key_counts=dict.fromkeys(partition.spaces),
            missing=dict.fromkeys(partition.spaces),
            count=_num_rows(columns),
            number=words(client_numbers(np.array([NOBODY]))[0]),
            rng=sent.rng,
        )
        return personal.device.predictions(_under(LOCAL, params), given)

    params = {SERVER + path: leaf for path, leaf in sent.params.items()}
    params |= {LOCAL + path: np.asarray(leaf) for path, leaf in local.items()}
    num_ids = {name: len(ids) for name, ids in personal.vocabularies.items()}
    return _needed(Program(predict, params, _columns(personal), num_ids))


def _under(part: str, params: Arrays) -> dict[str, Any]:
    return {path.removeprefix(part): leaf for path, leaf in params.items() if path.startswith(part)}


def _num_rows(columns: Arrays) -> Any:
    return next(iter(columns.values())).shape[0]


def _columns(personal: Personal) -> dict[str, jax.ShapeDtypeStruct]:
    """The model's columns as the training data had them."""
    for name in personal.setting.columns:
        if name not in personal.types:
            raise UserError(
                f"this run does not say which type its column '{name}' had, because an earlier version of partwise "
                f"wrote it: train it again"
            )
    one = lambda name: jax.ShapeDtypeStruct(personal.shapes[name], np.dtype(personal.types[name]))
    return {name: one(name) for name in personal.setting.columns}


def _needed(program: Program) -> Program:
    """The program without parameters and columns that its outputs do not depend on, such as the target."""
    names = [*sorted(program.params), *sorted(program.columns)]  # as JAX orders them
    kept = {names[i] for i in _staged(program, FIXED_ROWS, ("cpu",)).module_kept_var_idx}
    params = {path: leaf for path, leaf in program.params.items() if path in kept}
    columns = {name: column for name, column in program.columns.items() if name in kept}
    unread = {path: leaf for path, leaf in program.params.items() if path not in kept}
    if not columns:
        raise UserError(
            "the outputs of this model depend on no column of the data, so there is nothing to ask it"
        )

    def predict(params: Arrays, columns: Arrays) -> jax.Array:
        rest = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in unread.items()}
        others = {name: each for name, each in program.columns.items() if name not in columns}
        blank = {
            name: jnp.zeros((_num_rows(columns), *each.shape), each.dtype) for name, each in others.items()
        }
        return program.predict({**params, **rest}, {**columns, **blank})

    return Program(predict, params, columns, program.num_ids)


def batch_shapes(columns: Shapes, rows: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The columns of a batch of so many rows, a number or a symbol."""
    return {name: jax.ShapeDtypeStruct((rows, *each.shape), each.dtype) for name, each in columns.items()}


def any_rows() -> Any:
    """A symbol for the number of rows."""
    return stages.symbolic_shape("rows")[0]


def _staged(program: Program, rows: Any, platforms: tuple[str, ...]) -> stages.Exported:
    params = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in program.params.items()}
    stage = stages.export(jax.jit(program.predict), platforms=platforms)
    try:
        return stage(params, batch_shapes(program.columns, rows))
    except UserError:
        raise
    except Exception as error:  # of a model that needs a number of rows, or calls Python
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UserError(
            f"JAX cannot export what this model predicts ({reason}): mend the model's predict, or use the model "
            f"with `partwise predict`"
        ) from error


def to_stablehlo(program: Program, rows: int | None = None) -> Stages:
    """The program as `jax.export` serializes it, for any number of rows if the model allows it.

    Args:
        program: What `program_of` returned.
        rows: The number of rows, if it is to be fixed.
    """
    fixed = rows
    with _without_places():
        try:
            staged = _staged(program, rows or any_rows(), PLATFORMS)
        except UserError:
            if rows:
                raise
            fixed = FIXED_ROWS
            staged = _staged(program, fixed, PLATFORMS)
        data = bytes(staged.serialize())
    output = staged.out_avals[0]
    return Stages(data, fixed, jax.ShapeDtypeStruct(output.shape[1:], output.dtype))


def to_numpy(program: Program, rows: int | None = None) -> Stages:
    """The parameters as NumPy's own archive (.npz), which needs no other package. There is no program in it."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{path: np.asarray(leaf) for path, leaf in program.params.items()})
    output = _staged(program, rows or FIXED_ROWS, ("cpu",)).out_avals[0]
    return Stages(file.getvalue(), None, jax.ShapeDtypeStruct(output.shape[1:], output.dtype))


@contextmanager
def _without_places() -> Iterator[None]:
    """Programs that do not name the files of this machine in which their operations were written."""
    before = getattr(jax.config, PLACES)
    jax.config.update(PLACES, 0)
    try:
        yield
    finally:
        jax.config.update(PLACES, before)
