"""The heat of a model's key spaces, and its file (see `data.heat`).

It counts the keys that clients' examples name. Where clients ask for their own keys, that is who trains a row;
where they choose others (`random`, `same`, `all`), it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from partwise.checkpoint import load_arrays, save_arrays
from partwise.data.heat import By, Heat, count_heat
from partwise.data.store import ClientStore
from partwise.model.partition import Partition
from partwise.types import UserError

FORMAT = "partwise-heat"


def count_heats(store: ClientStore, partition: Partition, by: By = "clients") -> dict[str, Heat]:
    """The heat of every key space whose keys examples name."""
    return {
        space: count_heat(store, space, names, partition.num_keys(space), by, partition.block(space))
        for space in partition.spaces
        if (names := partition.columns[space])
    }


def save_heats(path: str | Path, heats: Mapping[str, Heat]) -> None:
    """A safetensors file: the counts of every space, and in its header what they count."""
    about = {space: {"by": heat.by, "total": heat.total} for space, heat in heats.items()}
    counts = {space: heat.counts for space, heat in heats.items()}
    save_arrays(Path(path), counts, {"format": FORMAT, "spaces": about})


def load_heats(path: str | Path) -> dict[str, Heat]:
    """What `save_heats` wrote, checked."""
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
