"""Where the journal of a run is: noted in the run's folder when the run is begun, and made then and never again.

    journal.url     the URL of the database, without a password; a file in the folder is named from there

So a command without `--journal` finds the journal that the run was begun with, and one with another is refused:
two journals would be two runs. The folder can be moved with the journal in it. If a journal outside of it has
moved, its new URL is written into the file by hand.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import exc

from partwise.checkpoint import write_file
from partwise.deployment.journal import Journal, found_journal, shown
from partwise.runs.folder import Folder
from partwise.types import UserError

JOURNAL_FILE, NOTED = "journal.db", "journal.url"
VERSIONS = "versions"  # the folder of the server's states


def begin_journal(folder: Path, run: str, url: str | None) -> None:
    """Make the journal of a new run (by default SQLite in its folder), and note where it is."""
    there = _from(Path(), url) if url else _default(folder)
    found_journal(there, run).close()
    _note(folder, there)


def journal_of(folder: Folder, url: str | None = None) -> Journal:
    """The journal of the run in a folder. A URL is needed only if it has a password."""
    noted = _noted(folder.path)
    there = _from(Path(), url) if url else noted or _default(folder.path)
    if noted and shown(there) != shown(noted):
        raise UserError(
            f"the journal of the run in '{folder.path}' is '{noted}', not '{shown(there)}': leave out --journal, "
            f"or give the first one with its password. If the journal was moved, write its new URL, without a "
            f"password, into '{folder.path / NOTED}'"
        )
    try:
        journal = Journal(there, folder.run)
    except UserError as error:
        raise UserError(
            f"{error}. The run in '{folder.path}' was begun with the journal '{noted or there}', and has no other: "
            f"restore both from one backup. If the journal was moved, write its URL, without a password, into "
            f"'{folder.path / NOTED}'"
        ) from None
    if not noted:
        _check_older(folder, journal)
        _note(folder.path, there)
    return journal


def _check_older(folder: Folder, journal: Journal) -> None:
    """Of a run of before journals were noted: raise `UserError` if another journal has its rounds."""
    with journal.transaction() as book:
        empty = book.round().number == 0
    if empty and any((folder.path / VERSIONS).glob("*.safetensors")):
        journal.close()
        raise UserError(
            f"the journal '{shown(journal.url)}' has no rounds, and '{folder.path}' has models of some: give the "
            f"journal that the run was begun with (--journal)"
        )


def _default(folder: Path) -> str:
    return f"sqlite:///{folder.resolve() / JOURNAL_FILE}"


def _noted(folder: Path) -> str | None:
    """The URL that the folder has, with the whole path of a file."""
    place = folder / NOTED
    return _from(folder, place.read_text().strip()) if place.exists() else None


def _note(folder: Path, url: str) -> None:
    """Write where the journal is: a file in the folder from there, so that the folder can be moved."""
    bare = sa.make_url(shown(url))
    if _is_file(bare) and Path(str(bare.database)).is_relative_to(folder.resolve()):
        bare = bare.set(database=str(Path(str(bare.database)).relative_to(folder.resolve())))
    write_file(folder / NOTED, f"{bare.render_as_string()}\n".encode())


def _from(base: Path, url: str) -> str:
    """A URL whose file has its whole path, from this folder."""
    try:
        parts = sa.make_url(url)
    except exc.ArgumentError:
        return url  # which cannot be opened, and that is said then
    if not _is_file(parts):
        return url
    return parts.set(database=str((base / str(parts.database)).resolve())).render_as_string()


def _is_file(url: sa.URL) -> bool:
    return url.get_backend_name() == "sqlite" and bool(url.database)
