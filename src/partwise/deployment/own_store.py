"""What a device keeps for its clients between rounds, in a folder that only its owner may read.

    belongs.json                the run and the model that everything here is of
    clients/HASH.kept           what a client keeps between rounds, as SCAFFOLD's control variate
    clients/HASH.local          a client's local part, with the version and the data that it was rebuilt from
    aside-N/                    what was there for another run or model

Nothing of it is ever sent. A file is complete or absent: it survives `kill -9`. What cannot be written, because the
disk is full, is kept in memory until it can be.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from partwise.checkpoint import load_arrays, remove_temporary_files, save_arrays, write_file
from partwise.runs.lock import HeldError, held
from partwise.types import UserError

log = logging.getLogger("partwise.agent")

Kind = Literal["kept", "local"]
BELONGS, CLIENTS = "belongs.json", "clients"
OWNER, OWNER_FOLDER = 0o600, 0o700


class Holding(NamedTuple):
    """Arrays of a client, and what is said of them."""

    arrays: Mapping[str, np.ndarray]
    said: Mapping[str, Any]


class OwnStore:
    """What a device keeps for its clients; without a folder, until the process ends."""

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._belongs: dict[str, str] = {}
        self._memory: dict[tuple[Kind, str], Holding] = {}
        self._full = False

    def belong(self, run: str, model: str) -> None:
        """From now on everything is of this run and this model (a digest). What is of others is set aside."""
        belongs = {"run": run, "model": model}
        if self._belongs not in ({}, belongs):
            self._memory.clear()
        self._belongs = belongs
        if self._folder is None or _read_belongs(self._folder) == belongs:
            return
        try:
            if (self._folder / CLIENTS).exists() or (self._folder / BELONGS).exists():
                aside = _aside(self._folder)
                log.warning("what the device kept is of another run or model: it is set aside in '%s'", aside)
            write_file(self._folder / BELONGS, json.dumps(belongs).encode(), mode=OWNER)
        except (UserError, OSError) as error:
            self._tell_full(error)

    def place(self, name: str) -> Path | None:
        """A folder for files that are fetched; None if there is no folder."""
        return None if self._folder is None else self._folder / name

    def get(self, kind: Kind, client: str) -> Holding | None:
        """What was put there last; None if there is nothing, or nothing that is whole."""
        if (kind, client) in self._memory or self._folder is None:
            return self._memory.get((kind, client))
        path = self._file(self._folder, kind, client)
        if not path.exists():
            return None
        try:
            arrays, said = load_arrays(path)
        except UserError as error:
            log.warning("what the device kept for a client is not used: %s", error)
            return None
        if {name: said.get(name) for name in ("run", "model", "kind", "client")} != self._says(kind, client):
            log.warning("'%s' is not of this client, run or model, and is not used", path)
            return None
        return Holding(arrays, said)

    def put(self, kind: Kind, client: str, arrays: Mapping[str, np.ndarray], **said: Any) -> None:
        """Keep arrays in the place of those before, and say something of them (values for JSON)."""
        self._memory[kind, client] = Holding(dict(arrays), {**said, **self._says(kind, client)})
        if self._folder is not None:
            self._write(self._folder)

    def _write(self, folder: Path) -> None:
        """Write what is in memory, also what could not be written before. What is on the disk leaves memory."""
        try:
            folder.joinpath(CLIENTS).mkdir(mode=OWNER_FOLDER, exist_ok=True)
            for (kind, client), kept in list(self._memory.items()):
                save_arrays(self._file(folder, kind, client), kept.arrays, kept.said, mode=OWNER)
                del self._memory[kind, client]
            self._full = False
        except (UserError, OSError) as error:
            self._tell_full(error)

    def _says(self, kind: Kind, client: str) -> dict[str, Any]:
        return {**self._belongs, "kind": kind, "client": client}

    def _file(self, folder: Path, kind: Kind, client: str) -> Path:
        return folder / CLIENTS / f"{hashlib.sha256(client.encode()).hexdigest()}.{kind}"

    def _tell_full(self, error: Exception) -> None:
        """One line, until something can be written again."""
        if not self._full:
            log.warning("the device's store cannot be written, and is kept in memory: %s", error)
        self._full = True


@contextlib.contextmanager
def opened(folder: str | Path) -> Iterator[OwnStore]:
    """The store in a folder, for this process alone. The folder is made if it is not there."""
    folder = Path(folder)
    try:
        folder.mkdir(mode=OWNER_FOLDER, parents=True, exist_ok=True)
        os.chmod(folder, OWNER_FOLDER)
    except OSError as error:
        raise UserError(
            f"'{folder}' cannot be a device's store ({error.strerror}): choose another folder with --store"
        ) from None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(folder))
        except HeldError as error:
            raise HeldError(
                f"another agent uses the store '{folder}', and every agent needs its own (--store): {error}"
            ) from None
        for each in (folder, folder / CLIENTS):
            remove_temporary_files(each)
        yield OwnStore(folder)


def _read_belongs(folder: Path) -> Any:
    try:
        return json.loads((folder / BELONGS).read_bytes())
    except (OSError, ValueError):
        return None


def _aside(folder: Path) -> Path:
    """Move everything into a new folder beside it. The first name that is free is taken."""
    number = 1
    while (folder / f"aside-{number}").exists():
        number += 1
    aside = folder / f"aside-{number}"
    aside.mkdir(mode=OWNER_FOLDER)
    for name in (CLIENTS, BELONGS):
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder / name, aside / name)
    return aside
