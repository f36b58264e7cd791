"""The second of two servers (`partwise helper`): what it holds, what it answers, and what it never answers twice.

The helper has a key of its own, to which clients seal what only it may read. It is asked by the first server alone.
It answers

* for slices: with rows under the client's pad, which the first server cannot read. A version has the rows that it
  was given first: answers to one question of two tables differ by rows that tell what was asked,
* for a sum: with its share and its noise, **once** for each version of a run. Shares of two sums that differ in one
  client would tell that client's update. The same question gets the same answer, which is kept for that.

It refuses sums of fewer reports than its operator wants. What it has answered is on the disk before it answers.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partwise.checkpoint import from_bytes, read_file, to_bytes, write_file
from partwise.privacy.sealing import new_sealing_key
from partwise.privacy.two_servers import Agreement, ForHelper, helper_share, read_agreement, with_noise
from partwise.server.private_slices import bucketed, helper_answer
from partwise.types import UserError

KEY_FILE, PUBLIC_FILE, TOKEN_FILE, BOOK_FILE = "helper.key", "helper.pub", "helper.token", "helper.db"
VERSIONS_KEPT = 3  # of the rows of a run, and of the shares of its sums
TABLES = """
CREATE TABLE IF NOT EXISTS agreements (run TEXT PRIMARY KEY, agreement TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    run TEXT NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, answer BLOB, PRIMARY KEY (run, version)
);
CREATE TABLE IF NOT EXISTS tables (
    run TEXT NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (run, version)
);
"""


class UnknownVersionError(UserError):
    """The helper does not have the rows of this version: they must be sent first."""


class Helper:
    """The second server's side of any number of runs.

    Args:
        folder: Where its keys and what it has answered are.
        least: The fewest reports of a sum that it takes part in.
    """

    def __init__(self, folder: str | Path, least: int = 1):
        self.folder, self.least = Path(folder), least
        self._private, self.public, self.token = _keys(self.folder)
        self._lock, self._book = threading.Lock(), _book(self.folder / BOOK_FILE)
        self._rows: OrderedDict[tuple[str, int], Mapping[str, np.ndarray]] = OrderedDict()

    def agree(self, text: bytes) -> None:
        """Take part in a run. What was agreed on once stays."""
        agreement = read_agreement(text)
        if agreement.least < self.least:
            raise UserError(
                f"this helper takes part in sums of {self.least} reports or more, and the run has sums of "
                f"{agreement.least}: raise deploy.quorum or cohort.size"
            )
        with self._lock, self._book:
            told = agreement.to_json()
            self._book.execute("INSERT OR IGNORE INTO agreements VALUES (?, ?)", (agreement.run, told))
            if self._agreement(agreement.run).to_json() != told:
                raise UserError(f"run '{agreement.run}' was agreed on with other values before, which stay")

    def put_rows(self, run: str, version: int, body: bytes) -> None:
        """Take the rows of a version: space -> uint8 [keys, bytes]."""
        agreement, (rows, _) = self.agreement(run), from_bytes(body)
        wanted = {space: (form.num_keys, form.row_bytes) for space, form in agreement.tables.items()}
        found = {space: each.shape for space, each in rows.items()}
        if found != wanted or any(each.dtype != np.uint8 for each in rows.values()):
            raise UserError(f"the rows of a version must be bytes of shapes {wanted}, not {found}")
        self._pin(run, version, rows)
        tables = bucketed(agreement, version, rows)
        with self._lock:
            self._rows[run, version] = tables
            mine = [each for each in self._rows if each[0] == run]
            for old in sorted(mine)[:-VERSIONS_KEPT]:
                del self._rows[old]

    def _pin(self, run: str, version: int, rows: Mapping[str, np.ndarray]) -> None:
        """Raise `UserError` if the version had other rows before."""
        digest = hashlib.sha256()
        for space in sorted(rows):
            digest.update(np.ascontiguousarray(rows[space]).data)
        with self._lock, self._book:
            self._book.execute(
                "INSERT OR IGNORE INTO tables VALUES (?, ?, ?)", (run, version, digest.hexdigest())
            )
            query = "SELECT digest FROM tables WHERE run = ? AND version = ?"
            if self._book.execute(query, (run, version)).fetchone()[0] != digest.hexdigest():
                raise UserError(
                    f"version {version} of run '{run}' had other rows before: the same question, answered of two "
                    f"tables, would tell a client's keys"
                )

    def slices(self, run: str, version: int, task: str, public: bytes, sealed: bytes) -> bytes:
        """The answer to a client's question, which the first server brings."""
        with self._lock:
            tables = self._rows.get((run, version))
        if tables is None:
            raise UnknownVersionError(f"the rows of version {version} of run '{run}' are not here")
        return helper_answer(self.agreement(run), self._private, tables, version, task, public, sealed)

    def share(self, run: str, version: int, body: bytes) -> bytes:
        """This server's share of the sum of reports, with its noise."""
        agreement, digest = self.agreement(run), hashlib.sha256(body).hexdigest()
        with self._lock:
            before = self._answered(run, version)
        if before is None:
            answer = self._computed(agreement, version, body)
            with self._lock, self._book:
                self._book.execute(
                    "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (run, version, digest, answer)
                )
                before = self._answered(run, version)
                self._book.execute(
                    "UPDATE answers SET answer = NULL WHERE run = ? AND version <= ?",
                    (run, version - VERSIONS_KEPT),
                )
        assert before is not None
        if before[0] != digest or before[1] is None:
            raise UserError(
                f"the sum of version {version} of run '{run}' was asked for before, of other reports: two such "
                f"sums could tell the difference, which is one client's"
            )
        return before[1]

    def _computed(self, agreement: Agreement, version: int, body: bytes) -> bytes:
        reports = read_reports(agreement, body)
        least = max(self.least, agreement.least)
        share, refused = helper_share(agreement, self._private, version, reports)
        if len(reports) - len(refused) < least:
            raise UserError(
                f"{len(reports) - len(refused)} reports that can be read are too few: sums here are of {least} or "
                f"more"
            )
        share = with_noise(agreement, share)
        arrays = {"dense": share.dense} | {f"table:{space}": rows for space, rows in share.tables.items()}
        return to_bytes(arrays, {"refused": refused})

    def agreement(self, run: str) -> Agreement:
        """What was agreed on for a run."""
        with self._lock:
            return self._agreement(run)

    def _agreement(self, run: str) -> Agreement:
        found = self._book.execute("SELECT agreement FROM agreements WHERE run = ?", (run,)).fetchone()
        if found is None:
            raise UserError(f"this helper knows no run '{run[:80]}': its server must agree with it first")
        return read_agreement(found[0])

    def _answered(self, run: str, version: int) -> tuple[str, bytes | None] | None:
        query = "SELECT digest, answer FROM answers WHERE run = ? AND version = ?"
        return self._book.execute(query, (run, version)).fetchone()

    def close(self) -> None:
        """Give back the book."""
        self._book.close()


def write_reports(agreement: Agreement, reports: list[ForHelper]) -> bytes:
    """What the helper is sent of the reports of a sum. They have all the same sizes, so they are arrays."""
    stacked = lambda each: np.stack([np.frombuffer(data, np.uint8) for data in each])
    arrays = {
        "digests": stacked(report.digest for report in reports),
        "sealed": stacked(report.sealed for report in reports),
        **{
            f"write:{space}": stacked(report.writes[space] for report in reports)
            for space in agreement.tables
        },
    }
    return to_bytes(arrays, {"tasks": [report.task for report in reports]})


def read_reports(agreement: Agreement, body: bytes) -> list[ForHelper]:
    """The inverse of `write_reports`."""
    arrays, header = from_bytes(body)
    tasks, names = (
        header.get("tasks"),
        {"digests", "sealed", *(f"write:{space}" for space in agreement.tables)},
    )
    if not isinstance(tasks, list) or len(set(map(str, tasks))) != len(tasks) or set(arrays) != names:
        raise UserError("the reports of a sum must have distinct tasks, and the arrays of the agreement")
    if any(each.ndim != 2 or len(each) != len(tasks) or each.dtype != np.uint8 for each in arrays.values()):
        raise UserError("the arrays of a sum's reports must have a row of bytes for each of them")
    row = lambda name, place: arrays[name][place].tobytes()
    return [
        ForHelper(
            str(task),
            row("digests", place),
            {space: row(f"write:{space}", place) for space in agreement.tables},
            row("sealed", place),
        )
        for place, task in enumerate(tasks)
    ]


def _keys(folder: Path) -> tuple[bytes, bytes, str]:
    """The helper's private and public key, and the first server's token. They are made if they are not there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / KEY_FILE).exists():
        private, public = new_sealing_key()
        write_file(folder / TOKEN_FILE, secrets.token_urlsafe(32).encode(), mode=0o600)
        write_file(folder / PUBLIC_FILE, public.hex().encode())
        write_file(folder / KEY_FILE, private, mode=0o600)
    public = bytes.fromhex(read_file(folder / PUBLIC_FILE).decode())
    return read_file(folder / KEY_FILE), public, read_file(folder / TOKEN_FILE).decode().strip()


def _book(path: Path) -> Any:
    book = sqlite3.connect(path, check_same_thread=False)
    for line in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL"):
        book.execute(line)
    book.executescript(TABLES)
    return book
