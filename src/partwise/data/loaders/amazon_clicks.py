"""Amazon ratings as clicks: a user, a target item, the items the user liked before, and whether this one is
liked.

There are two formats. `amazon_train.tsv` is the training part of Federated Submodel Averaging's Amazon task.
Its lines have label, user, item and history, separated by tabs. Ids start at 1. The history is separated by
commas, or is `0` for none. The other format is raw ratings, a CSV file of `user,item,rating,timestamp`, with
that paper's preprocessing (section 5.1): users with at least 40 ratings, 5 stars are positive, and the
history is all earlier items with 5 stars.

Columns: `user` and `item` (keys), `history` (keys of `item`, the last ones, padded with -1 at the end),
`label`; for raw ratings also `time`. Rows of a user are in time order. A user who never liked anything has
empty histories.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from partwise.data.loaders.locate import data_root, first_of
from partwise.data.loaders.packed import open_packed
from partwise.data.ragged import last_of, offsets
from partwise.data.reading import reading
from partwise.data.store import ClientStore
from partwise.types import UserError

FOLDER = "amazon-electronics-fedsubavg"
FILES = ("amazon_train.tsv", "amazon_electronics_fedsubavg.zip")
POSITIVE = 5  # stars
HISTORY = r"^(0|[1-9]\d{0,8}(,[1-9]\d{0,8})*)$"
TEXT = pa.dictionary(pa.int32(), pa.string())
READERS = {pa.int64(): int, pa.float64(): float, pa.string(): str, TEXT: str}


class Format(NamedTuple):
    """Names and types of the fields of a line."""

    separator: str
    types: dict[str, pa.DataType]

    @property
    def line(self) -> str:
        return self.separator.join(self.types)


EXAMPLES = Format("\t", {"label": pa.int64(), "user": pa.int64(), "item": pa.int64(), "history": pa.string()})
RATINGS = Format(",", {"user": TEXT, "item": TEXT, "rating": pa.float64(), "timestamp": pa.int64()})


class File(NamedTuple):
    """A file's text, its name for messages, and whether its first line is a header."""

    text: bytes
    where: str
    header: bool

    def refuse(self, bad: np.ndarray, expected: str) -> None:
        """Raise `UserError` for the first bad row, if there is one."""
        if bad.any():
            raise self.bad_line(int(np.flatnonzero(bad)[0]) + 1 + self.header, expected)

    def bad_line(self, number: int, expected: str) -> UserError:
        shown = self.text.split(b"\n", number)[number - 1][:80].decode("latin-1").rstrip("\r")
        return UserError(
            f"{self.where}, line {number}: {shown!r}; expected {expected}. Mend or remove the line"
        )


def load(path: str | Path | None = None, length: int = 50, min_ratings: int = 40) -> ClientStore:
    """Load either format. Histories are cut to their last `length` items; `info` says how many were cut.

    Without a path, the environment variable PARTWISE_DATA says where to look for the first format.
    """
    if length < 1:
        raise UserError(f"length is {length}: a history has room for at least 1 item")
    source = _locate(path)
    raw = ".csv" in source.suffixes
    form = RATINGS if raw else EXAMPLES
    info = {"source": "Amazon clicks", "file": str(source), "history_length": length}
    with reading(source):
        text, where = _read(source)
        if not text.strip():
            raise UserError(f"{where} is empty: expected lines of {form.line!r}")
        header = text.split(b"\n", 1)[0].strip().decode("latin-1") == form.line
        file = File(text, where, header)
        return _from_ratings(file, length, min_ratings, info) if raw else _from_examples(file, length, info)


def _locate(path: str | Path | None) -> Path:
    how = "give amazon_train.tsv, the zip that holds it, or a .csv file of user,item,rating,timestamp"
    root = data_root(path, "Amazon clicks", how, how)
    return first_of(root, [*FILES, *(f"{FOLDER}/{name}" for name in FILES)], "Amazon clicks", f"; {how}")


def _read(source: Path) -> tuple[bytes, str]:
    """The file's text, and its name for messages."""
    with open_packed(source, lambda names: FILES[0] if FILES[0] in names else None, FILES[0]) as stream:
        return stream.read(), f"{source}/{FILES[0]}" if source.suffix == ".zip" else str(source)


def _parse(file: File, form: Format) -> pa.Table:
    options = pyarrow.csv.ParseOptions(delimiter=form.separator, quote_char=False, ignore_empty_lines=False)
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(file.text),
            read_options=pyarrow.csv.ReadOptions(column_names=list(form.types), skip_rows=int(file.header)),
            parse_options=options,
            convert_options=pyarrow.csv.ConvertOptions(column_types=form.types, null_values=[]),
        )
    except pa.ArrowInvalid as error:
        raise _find_bad_line(file, form, str(error)) from error
    if not table.num_rows:
        raise UserError(f"{file.where} holds no rows: expected lines of {form.line!r}")
    return table.unify_dictionaries().combine_chunks()


def _find_bad_line(file: File, form: Format, reason: str) -> UserError:
    """Read line by line to find the first bad line. Returns the error that names it."""
    for number, line in enumerate(file.text.removesuffix(b"\n").split(b"\n"), start=1):
        if not _is_utf8(line):
            return file.bad_line(number, "text in UTF-8: save the file so")
        values = line.decode("latin-1").rstrip("\r").split(form.separator)
        try:
            if len(values) != len(form.types):
                raise ValueError
            for value, kind in zip(values, form.types.values(), strict=True):
                READERS[kind](value)
        except ValueError:
            if not (file.header and number == 1):
                return file.bad_line(number, repr(form.line))
    return UserError(f"{file.where} cannot be read ({reason}): expected lines of {form.line!r}")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _from_examples(file: File, length: int, info: dict[str, Any]) -> ClientStore:
    """Rows that come with their histories. A user's rows are in time order already."""
    table = _parse(file, EXAMPLES)
    label, user, item = (table[name].to_numpy() for name in ("label", "user", "item"))
    file.refuse((label < 0) | (label > 1), "label 0 or 1")
    file.refuse((user < 1) | (item < 1), "user and item from 1 on (0 is nothing)")
    text = table["history"].chunk(0)
    well_formed = pc.match_substring_regex(text, HISTORY).to_numpy(zero_copy_only=False)  # pyright: ignore
    file.refuse(~well_formed, "a history of items like 4,1,5, or 0 for none")
    lists = pc.split_pattern(text, ",")  # pyright: ignore[reportAttributeAccessIssue]
    items, ends = lists.values.cast(pa.int64()).to_numpy(), lists.offsets.to_numpy()[1:].astype(np.int64)
    lengths = np.where(items[ends - 1] == 0, 0, np.diff(ends, prepend=0))
    vocabulary = np.unique(np.concatenate([item, items[items > 0]]))
    history = last_of(np.searchsorted(vocabulary, items), ends, lengths, length)
    columns = {"item": np.searchsorted(vocabulary, item), "history": history, "label": label}
    return _store(user, columns, vocabulary, lengths, info)


def _from_ratings(file: File, length: int, min_ratings: int, info: dict[str, Any]) -> ClientStore:
    """Rows whose histories are the user's earlier rows. Rows of the same second are in the file's order."""
    table = _parse(file, RATINGS)
    users, items = table["user"].chunk(0), table["item"].chunk(0)
    stars, time = table["rating"].to_numpy(), table["timestamp"].to_numpy()
    for column in (users, items):
        names = np.array(column.dictionary.to_pylist())
        file.refuse((names == "")[column.indices.to_numpy()], "an id of a user and one of an item")
    file.refuse(~((stars >= 0) & (stars <= 5)), "a rating from 0 to 5")  # NaN is outside too
    file.refuse(time < 0, "a time in seconds from 1970 on")
    user = users.indices.to_numpy().astype(np.int64)
    ratings = np.bincount(user)
    if ratings.max() < min_ratings:
        raise UserError(
            f"{file.where}: no user has at least {min_ratings} ratings, the most is {ratings.max()}; "
            f"lower min_ratings"
        )
    rows = np.flatnonzero(ratings[user] >= min_ratings)
    rows = rows[np.lexsort((time[rows], user[rows]))]
    user, positive = user[rows], stars[rows] >= POSITIVE
    who, what = (np.array(column.dictionary.to_pylist()) for column in (users, items))
    vocabulary, item = np.unique(what[items.indices.to_numpy()[rows]], return_inverse=True)
    ends = np.cumsum(positive) - positive  # how many positive rows come before each row
    first = np.flatnonzero(np.diff(user, prepend=-1))
    lengths = ends - np.repeat(ends[first], np.diff(np.append(first, len(user))))
    history = last_of(item[positive], ends, lengths, length)
    columns = {"item": item, "history": history, "label": positive, "time": time[rows]}
    info = info | {"dropped_ratings": len(table) - len(rows)}
    return _store(who[user], columns, vocabulary, lengths, info)


def _store(
    user: np.ndarray,
    columns: dict[str, np.ndarray],
    vocabulary: np.ndarray,
    lengths: np.ndarray,
    info: dict[str, Any],
) -> ClientStore:
    """Rows grouped by user. The store's info describes their histories."""
    client_ids, position = np.unique(user, return_inverse=True)
    order = np.argsort(position, kind="stable")
    counts = np.bincount(position)
    columns = {"user": position.astype(np.int32)} | columns
    columns |= {"item": columns["item"].astype(np.int32), "label": columns["label"].astype(np.float32)}
    told = info | {
        "longest_history": int(lengths.max()),
        "histories_cut": int((lengths > info["history_length"]).sum()),
        "users_without_history": int((np.bincount(position, lengths) == 0).sum()),
    }
    rows = {name: values[order] for name, values in columns.items()}
    keys = {"user": client_ids, "item": vocabulary, "history": vocabulary}
    return ClientStore(rows, offsets(counts), counts, client_ids, keys, told)
