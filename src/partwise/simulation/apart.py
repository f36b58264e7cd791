"""What a process must know of the clients of other processes, if each has read only those of its own devices.

Tables are cut to the rows that any client of a round asks for, arrays have the same sizes on all devices, and
records tell of all clients. So in every call the processes tell each other which clients they have and what these
ask for, but none of their examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from partwise.checkpoint import from_bytes, to_bytes
from partwise.data.ragged import offsets
from partwise.simulation.exchange import told


class CallClients(NamedTuple):
    """What is known of the clients of a call, of this process's devices or of all."""

    clients: np.ndarray  # [rounds, devices, chunks, lanes] positions in the store, -1 for no client
    key_count: Mapping[str, np.ndarray]  # space -> [rounds, devices, chunks, lanes]
    missed: np.ndarray  # [rounds]: how many ids of their examples are outside their slices
    rows: Mapping[str, list[np.ndarray]]  # space -> the distinct keys of every round, sorted
    sizes: Mapping[str, int]  # name of an array -> how long it must be at least


def of_all_processes(mine: CallClients) -> CallClients:
    """What is known of the clients of all processes, from what each knows of its own. It is collective."""
    return joined([_read(each) for each in told(_written(mine))])


def rows_of_all(rows: Mapping[str, list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """The distinct rows of a round that the clients of any process ask for, by space, sorted. It is collective."""
    everybody = [from_bytes(each)[0] for each in told(to_bytes({s: each[0] for s, each in rows.items()}))]
    return {space: [np.unique(np.concatenate([each[space] for each in everybody]))] for space in rows}


def joined(parts: list[CallClients]) -> CallClients:
    """Parts with clients on different devices, as one."""
    first = parts[0]
    beside = lambda arrays: np.concatenate(list(arrays), axis=1)
    union = lambda space, i: np.unique(np.concatenate([part.rows[space][i] for part in parts]))
    return CallClients(
        clients=beside(part.clients for part in parts),
        key_count={space: beside(part.key_count[space] for part in parts) for space in first.key_count},
        missed=np.sum([part.missed for part in parts], axis=0),
        rows={space: [union(space, i) for i in range(len(each))] for space, each in first.rows.items()},
        sizes={name: max(part.sizes[name] for part in parts) for name in first.sizes},
    )


def _written(known: CallClients) -> bytes:
    arrays = {"clients": known.clients, "missed": known.missed}
    arrays |= {f"count {space}": counts for space, counts in known.key_count.items()}
    arrays |= {f"rows {space}": np.concatenate(each) for space, each in known.rows.items()}
    arrays |= {f"ends {space}": np.array(list(map(len, each))) for space, each in known.rows.items()}
    return to_bytes(
        arrays, {"sizes": dict(known.sizes), "spaces": list(known.key_count), "cut": list(known.rows)}
    )


def _read(data: bytes) -> CallClients:
    arrays, header = from_bytes(data)
    rows = {s: np.split(arrays[f"rows {s}"], offsets(arrays[f"ends {s}"])[1:]) for s in header["cut"]}
    counts = {space: arrays[f"count {space}"] for space in header["spaces"]}
    return CallClients(arrays["clients"], counts, arrays["missed"], rows, header["sizes"])
