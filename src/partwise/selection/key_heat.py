"""The heat of a model's key spaces, and its file (see `data.heat`).

Heat counts the keys that clients' examples name, over the clients that can take part in a round with a weight. If
clients ask for their own keys, these are also the rows that they are sent. If clients choose other keys (`random`,
`same`, `all`), this is not so. A client also holds a row that only its support set names: it is sent the row, and
its change of it counts, even if it is 0. The other means over holders (`server.mean` = holders, seen) count it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from partwise.checkpoint import load_arrays, save_arrays
from partwise.data.heat import By, Heat, count_heat, holders
from partwise.data.store import ClientStore
from partwise.types import UserError

if TYPE_CHECKING:
    from partwise.model.partition import Partition  # not here, as it brings JAX

FORMAT = "partwise-heat"


def count_heats(
    store: ClientStore, partition: Partition, by: By = "clients", weights: np.ndarray | None = None
) -> dict[str, Heat]:
    """The heat of every key space that has key columns in the examples. `weights` are as in `count_heat`."""
    return {
        space: count_heat(store, space, names, partition.num_keys(space), by, partition.block(space), weights)
        for space in partition.spaces
        if (names := partition.columns[space])
    }


def held_pairs(store: ClientStore, partition: Partition) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Who holds what: {key space: (client, key)}, of every key space that has key columns in the examples."""
    return {
        space: holders(store, space, names, partition.num_keys(space), partition.block(space))
        for space in partition.spaces
        if (names := partition.columns[space])
    }


def save_heats(path: str | Path, heats: Mapping[str, Heat]) -> None:
    """Write a safetensors file with the counts of every space. The header says what they count."""
    about = {space: {"by": heat.by, "total": heat.total} for space, heat in heats.items()}
    counts = {space: heat.counts for space, heat in heats.items()}
    save_arrays(Path(path), counts, {"format": FORMAT, "spaces": about})


def load_heats(path: str | Path) -> dict[str, Heat]:
    """Read what `save_heats` wrote. Raises `UserError` if the file is damaged."""
    arrays, header = load_arrays(Path(path))
    if header.get("format") != FORMAT:
        held = ", ".join(sorted(arrays)[:5]) or "nothing"
        raise UserError(
            f"'{path}' is no file of heat (it holds {held}): give one that `partwise heat TASK --out DIR` or "
            f"save_heats wrote"
        )
    try:
        return {space: Heat(space, arrays[space], **about) for space, about in header["spaces"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{path}' is damaged ({error!r}): count the heat and write it again") from None
    except UserError as error:
        raise UserError(f"'{path}' is damaged: {error}") from None
