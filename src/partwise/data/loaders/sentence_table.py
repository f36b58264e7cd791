"""A table of sentences: a row for every sentence, with the columns `user` and `text`, and perhaps `rank` or `day`.

A client is a user. Its sentences are in the order of `rank`; without this column, of `day`; without both, of
the rows. The table is a Parquet, Arrow, CSV or TSV file.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from partwise.data.arrow import arrow_numbers, to_texts
from partwise.data.late_arrow import kinds
from partwise.data.loaders.locate import data_root, first_of
from partwise.data.reading import guarded, is_there
from partwise.data.table import column_names, is_delimited, is_table, stream_columns
from partwise.data.text.corpus import Corpus, Text
from partwise.data.text.words import is_word, tokens
from partwise.types import UserError

USER, TEXT = "user", "text"
ORDERS = ("rank", "day")  # the first that is there
LARGEST = 2**53  # up to here, float64 has every whole number
FILES = ("blog_sentences.parquet", "sentences.parquet", "sentences.arrow", "sentences.csv")
HOW = f"give a table with the columns {USER} and {TEXT}, and perhaps {' or '.join(ORDERS)}; or its folder"


def load(path: str | Path | None = None) -> Corpus:
    """The sentences of all users, a text for each user. A row without a word is left out and counted. All
    sentences are held in memory during a pass."""
    root = data_root(path, "a table of sentences", HOW, HOW)
    file = first_of(root, [*FILES, *(f"blogs/{name}" for name in FILES)], "table of sentences", f"; {HOW}")
    return Corpus(f"sentences {file}", guarded(file, lambda counts: _read(file, counts)))


def locate(path: str | Path | None) -> Path | None:
    """The table, if `path` is one with these columns, or a folder that has one directly. Otherwise None."""
    if path is None:
        return None
    source = Path(path).expanduser()
    if source.is_dir():
        return next((source / name for name in FILES if is_there(source / name)), None)
    there = is_there(source) and is_table(source)
    return source if there and {USER, TEXT} <= set(column_names(source)) else None


def refuse_others(path: str | Path | None) -> None:
    """Raise `UserError` if `path` is a table that seems to be one of sentences, but lacks a column."""
    source = Path(path).expanduser() if path else None
    if not (source and is_there(source) and is_table(source)):
        return
    names = column_names(source)
    if {USER, TEXT} & set(map(str.lower, names)):
        missing = " and ".join(name for name in (USER, TEXT) if name not in names)
        raise UserError(f"{source} has the columns {', '.join(names)}, but no {missing}: {HOW}")


def _read(file: Path, counts: Counter[str]) -> Iterator[Text]:
    names = column_names(file)
    order = next((name for name in ORDERS if name in names), None)
    said: dict[str, tuple[list[str], list[np.ndarray]]] = {}
    for user, texts, ranks in _runs(file, order):
        held = said.setdefault(user, ([], []))
        held[0].extend(texts)
        held[1].append(ranks)
    if not said:
        raise UserError(f"{file} has no rows: {HOW}")
    for user in sorted(said):
        texts, ranks = said[user]
        places = np.argsort(np.concatenate(ranks), kind="stable") if order else range(len(texts))
        found = tuple(filter(None, (_sentence(texts[place], counts) for place in places)))
        if found:
            yield Text(user, 0, "sentence", "", found, ())


def _runs(file: Path, order: str | None) -> Iterator[tuple[str, list[str], np.ndarray]]:
    """(user, texts, their order) of successive rows of one user."""
    first_row = 0
    wanted = (USER, TEXT, *([order] if order else []))
    for batch in stream_columns(file, wanted, (USER, TEXT)):
        users = _required(USER, to_texts(USER, batch[USER], first_row), file, first_row)
        texts = _required(TEXT, to_texts(TEXT, batch[TEXT], first_row), file, first_row)
        ranks = _ranks(order, batch[order], file, first_row) if order else np.zeros(len(users))
        starts = [0, *(k for k in range(1, len(users)) if users[k] != users[k - 1]), len(users)]
        for begin, end in itertools.pairwise(starts):
            if begin < end:
                yield users[begin], texts[begin:end], ranks[begin:end]
        first_row += len(users)


def _ranks(order: str, values: Any, file: Path, first_row: int) -> np.ndarray:
    """The order of the rows, as numbers that tell all of them apart."""
    ranks = arrow_numbers(order, values, first_row)
    if kinds.is_decimal(values.type):
        return np.array(values.to_pylist(), object)  # a float64 does not tell all decimals apart
    if np.isnan(ranks).any():
        raise UserError(
            f"{file}, row {first_row + int(np.isnan(ranks).argmax())}: {order} is NaN; expected the place of "
            "the sentence. Mend or remove the row"
        )
    # Arrow reads a column of a text file as float64 if one of its whole numbers is too large for 64 bits.
    rounded = np.abs(ranks) > LARGEST if is_delimited(file) and ranks.dtype.kind == "f" else np.zeros(1, bool)
    if rounded.any():
        row = int(rounded.argmax())
        raise UserError(
            f"{file}, row {first_row + row}: {order} is about {ranks[row]:.17g}; in a text file, the order of "
            f"numbers is kept below 2^63, and below 2^53 if some have a point. Give smaller whole numbers, such as "
            f"the place of each sentence: 0, 1, 2"
        )
    return ranks


def _required(name: str, values: list[Any], file: Path, first_row: int) -> list[str]:
    """The values as text. A text may be empty, a user may not. A user may be a whole number with a point."""
    for number, value in enumerate(values):
        if name == USER and isinstance(value, float) and value.is_integer():
            values[number] = value = int(value)
        if not (isinstance(value, str) if name == TEXT else isinstance(value, str | int) and value != ""):
            expected = "a text or whole number, who wrote the sentence" if name == USER else "a sentence"
            raise UserError(
                f"{file}, row {first_row + number}: {name} is {str(value)[:40]!r}; expected {expected}. "
                "Mend or remove the row"
            )
    return list(map(str, values))


def _sentence(text: str, counts: Counter[str]) -> str:
    counts["rows"] += 1
    found = tokens(text)
    spoken = any(map(is_word, found))
    counts["dropped_no_words"] += not spoken
    return " ".join(found) if spoken else ""
