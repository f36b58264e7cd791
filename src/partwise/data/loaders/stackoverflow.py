"""Stack Overflow in TensorFlow Federated's form: every example is one tokenised sentence of a user.

A sentence of an answer has the title and tags of its question. Users of `test` are those of `train`, at a
later time. Users of `heldout` are in no other split.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from partwise.data.loaders import tff
from partwise.data.reading import guarded, is_there
from partwise.data.text.corpus import Corpus, Text, milliseconds
from partwise.data.text.words import MAX_LETTERS, tokens
from partwise.types import unknown

SPLITS = ("train", "heldout", "test")
HDF5_PARTS = ("train", "held_out")  # in the names of the older files
FILES = ("stackoverflow.sqlite", "stackoverflow.sqlite.lzma", "stackoverflow_train.h5")
FEATURES = ("creation_date", "tags", "title", "tokens", "type")


def load(path: str | Path, split: str | None = None) -> Corpus:
    """The sentences of one split, one client after the other, from the SQLite file or from the split's own
    HDF5 file.

    Tokens are not changed, except that they are cut to 40 letters. Bytes that are not UTF-8 become U+FFFD;
    examples with such bytes are counted. An example without a token and without a title is left out and
    counted.
    """
    if split is not None and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    where = f"{path}, split {split}" if split else str(path)

    def read(counts: Counter[str]) -> Iterator[Text]:
        for client, examples in tff.read_clients(path, split, FEATURES):
            for values in zip(*(examples[name] for name in FEATURES), strict=True):
                yield from _text(client, [_decode(value) for value in values], where, counts)

    return Corpus(f"Stack Overflow {where}", guarded(path, read))


def locate(path: str | Path | None) -> Path | None:
    """TFF's file, if the name of `path` is right for one, or if `path` is a folder that has one. Otherwise
    None, also for TFF's Shakespeare."""
    if path is None:
        return None
    source = Path(path).expanduser()
    if source.is_dir():
        return next((source / name for name in FILES if is_there(source / name)), None)
    named = source.name.endswith(tff.SUFFIXES) and not source.name.startswith("shakespeare")
    return source if named else None


@contextlib.contextmanager
def open_unseen(source: Path) -> Iterator[tuple[Corpus, Corpus]]:
    """(training users, users in no other split). The SQLite file is unpacked only once. HDF5 files are
    `..._train.h5` and `..._held_out.h5`; `source` is one of them."""
    if tff.is_hdf5(source):
        train, unseen = (tff.sibling(source, part, HDF5_PARTS) for part in HDF5_PARTS)
        yield load(train), load(unseen)
        return
    with tff.unpacked(source) as file:
        yield load(file, "train"), load(file, "heldout")


def _text(client: str, values: list[str], where: str, counts: Counter[str]) -> Iterator[Text]:
    counts["examples"] += 1
    counts["examples_not_utf8"] += any("\ufffd" in value for value in values)
    date, tags, title, sentence, kind = values
    words = " ".join(word[:MAX_LETTERS] for word in sentence.split())
    heading = " ".join(tokens(title))
    if not words and not heading:
        counts["dropped_no_words"] += 1
        return
    time = milliseconds(date, f"{where}, client {client}")
    names = tuple(name for name in tags.split("|") if name)
    yield Text(client, time, kind, heading, (words,) if words else (), names)


def _decode(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
