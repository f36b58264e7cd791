"""Sentiment140: tweets and whether they are positive, from the official CSV file or the zip it comes in.

A row is polarity (0 negative, 4 positive), id, date, query, user, text. The file is latin-1, quoted, without
a header. A client is a user. Tokens are those of LEAF (`text.leaf_tokens`).
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from partwise.data.loaders.packed import open_packed
from partwise.data.reading import guarded
from partwise.data.text.corpus import NEGATIVE, POSITIVE, Corpus, Text
from partwise.data.text.words import leaf_tokens
from partwise.types import UserError

FIELDS = ("polarity", "id", "date", "query", "user", "text")
LABELS = {"0": NEGATIVE, "4": POSITIVE}
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
ZONES = {"PDT": 7, "PST": 8, "UTC": 0}  # hours to add for UTC
DOWNLOAD = "http://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip"
MEMBER = "one .csv file, or one whose name begins with 'training',"
EXPECTED = f"{len(FIELDS)} quoted fields: {', '.join(FIELDS)}"

_DATE = re.compile(r"\w{3} (\w{3}) (\d\d) (\d\d):(\d\d):(\d\d) (\w+) (\d{4})")


def load(file: str | Path) -> Corpus:
    """The tweets of all users, from the CSV file: plain, as .gz, or in a .zip (if it has several, the
    training file).

    A row is one `Text`, tagged positive or negative. A tweet without a word is kept and counted. Blank lines
    are ignored. Any other row that does not have the format above raises a `UserError` that names its line.
    """
    place = Path(file)

    def read(counts: Counter[str]) -> Iterator[Text]:
        with (
            open_packed(place, training_member, MEMBER) as source,
            io.TextIOWrapper(source, encoding="latin-1", newline="") as lines,
        ):
            for line, row in _rows(lines, place):
                yield _text(row, f"{place}, line {line}", counts)

    return Corpus(f"Sentiment140 {place}", guarded(place, read))


def training_member(names: list[str]) -> str | None:
    """The training file in a zip: the only .csv, or the one whose name begins with `training`."""
    tables = [name for name in names if name.lower().endswith(".csv") and not name.startswith("__MACOSX")]
    of_training = [name for name in tables if Path(name).name.startswith("training")]
    return next(iter(of_training or tables[: len(tables) == 1]), None)


def _rows(lines: io.TextIOWrapper, file: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows with the line on which each begins (a quoted text may hold line ends)."""
    reader, first = csv.reader(lines), 1
    try:
        for row in reader:
            if row:
                yield first, row
            first = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{file}, line {first}: {error}; expected {EXPECTED}. Is a quote left open? Mend the row"
        ) from error


def _text(row: list[str], where: str, counts: Counter[str]) -> Text:
    if len(row) != len(FIELDS):
        raise UserError(f"{where}: {len(row)} fields; expected {EXPECTED}. Mend or remove the row")
    polarity, _, date, _, user, said = row
    if polarity not in LABELS:
        raise UserError(
            f"{where}: polarity is {polarity!r}; expected 0 (negative) or 4 (positive). "
            "Remove such rows (the test file of Sentiment140 has neutral ones, 2)"
        )
    if not user:
        raise UserError(f"{where} has no user: mend or remove the row")
    words = leaf_tokens(said)
    counts["without_token"] += not words
    time = _milliseconds(date, where)
    return Text(user, time, "tweet", "", (" ".join(words),) if words else (), (LABELS[polarity],))


def _milliseconds(date: str, where: str) -> int:
    found = _DATE.fullmatch(date)
    if found is None or found[1] not in MONTHS or found[6] not in ZONES:
        raise UserError(f"{where}: date {date!r}; expected one like Mon Apr 06 22:19:45 PDT 2009")
    month, day, hour, minute, second, zone, year = found.groups()
    try:
        moment = datetime(
            int(year), MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second), tzinfo=UTC
        )
    except ValueError as error:
        raise UserError(f"{where}: date {date!r} ({error}); mend the row") from error
    return round(moment.timestamp() * 1000) + ZONES[zone] * 3_600_000
