"""Shakespeare: the speeches of every role, from JSON lines or from TensorFlow Federated's files.

A client is a role of a play. JSON lines (`shakespeare_by_character.jsonl`, also `.gz`) have `play`,
`character`, `order` and `text`. TFF's files (`shakespeare.sqlite`, also `.lzma`; `shakespeare_train.h5` and
`_test.h5`) have a speech in the feature `snippets`. Their split `test` has the last speeches of the roles of
`train`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from partwise.data.loaders import tff
from partwise.data.loaders.json_lines import read_lines, read_object
from partwise.data.loaders.locate import data_root, first_of
from partwise.data.reading import guarded, is_there
from partwise.data.text.corpus import Corpus, Text
from partwise.data.text.words import sentences
from partwise.types import UserError

SPLITS = ("train", "test")
JSON_LINES = ("shakespeare_by_character.jsonl", "shakespeare_by_character.jsonl.gz")
FILES = (*JSON_LINES, "shakespeare.sqlite", "shakespeare.sqlite.lzma", "shakespeare_train.h5")
EXPECTED = "a JSON object with play, character, order and text"


class Speech(NamedTuple):
    """What a role says before another role speaks, and its number among the role's speeches."""

    role: str
    order: int
    text: str


def load(path: str | Path | None = None, min_speeches: int = 2) -> Corpus:
    """The speeches of all roles that have at least `min_speeches` (2, as in LEAF). A text's time is its
    order.

    `path` is one of the files above or their folder. Without it, PARTWISE_DATA says where to look, there or
    in its folder `shakespeare`. For TFF's files, both splits are read, one after the other. A line of verse
    is a separate sentence. (If lines were joined, a third of all words would be after the first 20 of a
    sentence.)

    Roles with fewer speeches, and speeches without a word, are left out and counted. Bytes that are not UTF-8
    raise `UserError`. All speeches are held in memory during a pass.
    """
    if min_speeches < 1:
        raise UserError(
            f"min_speeches is {min_speeches}: give at least 1, the speeches that a role must have"
        )
    source = _find(path)

    def read(counts: Counter[str]) -> Iterator[Text]:
        speeches = list(_read_tff(source) if source.name.endswith(tff.SUFFIXES) else _read_json(source))
        held = Counter(speech.role for speech in speeches)
        counts["speeches"] = len(speeches)
        counts["roles"] = len(held)
        counts["dropped_roles_of_few_speeches"] = sum(number < min_speeches for number in held.values())
        for speech in speeches:
            if held[speech.role] >= min_speeches:
                yield from _text(speech, counts)

    return Corpus(f"Shakespeare {source}", guarded(source, read))


def locate(path: str | Path | None) -> Path | None:
    """The file, if the name of `path` is right for one, or if `path` is a folder that has one directly.
    Otherwise None. A folder with several data sets is not used, and without a path the result is None."""
    if path is None:
        return None
    source = Path(path).expanduser()
    if source.is_dir():
        return next((source / name for name in FILES if is_there(source / name)), None)
    of_tff = source.name.startswith("shakespeare") and source.name.endswith(tff.SUFFIXES)
    return source if of_tff or source.name.endswith((".jsonl", ".jsonl.gz")) else None


def _find(path: str | Path | None) -> Path:
    expected = f"give {FILES[0]}, {FILES[2]} or their folder"
    root = data_root(path, "the speeches of Shakespeare", "pass the file or its folder", expected)
    beside = [f"shakespeare/{name}" for name in FILES]
    return first_of(root, [*FILES, *beside], "speeches of Shakespeare")


def _text(speech: Speech, counts: Counter[str]) -> Iterator[Text]:
    said = tuple(" ".join(sentence) for sentence in sentences(speech.text))
    if said:
        yield Text(speech.role, speech.order, "speech", "", said, ())
    else:
        counts["dropped_no_words"] += 1


def _read_json(file: Path) -> Iterator[Speech]:
    for where, line in read_lines(file):
        speech = read_object(_decode(line, where), where, EXPECTED)
        play, character = (_words(speech, name, where) for name in ("play", "character"))
        order = speech.get("order")
        if not isinstance(order, int) or isinstance(order, bool) or not 0 <= order < 2**63:
            raise UserError(
                f"{where}: order is {order!r}; expected a whole number from 0. Mend or remove the line"
            )
        text = speech.get("text")
        if not isinstance(text, str):
            raise UserError(f"{where}: text is {text!r}; expected what is said. Mend or remove the line")
        yield Speech(f"{play}/{character}", order, text)


def _words(speech: dict[str, Any], name: str, where: str) -> str:
    value = speech.get(name)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {name} is {value!r}; expected a name. Mend or remove the line")
    return value


def _read_tff(file: Path) -> Iterator[Speech]:
    so_far: Counter[str] = Counter()
    for where, role, snippets in _snippets(file):
        for number, snippet in enumerate(snippets):
            text = _decode(snippet, f"{where}, client {role}, snippet {number}")
            yield Speech(role, so_far[role], text)
            so_far[role] += 1


def _snippets(file: Path) -> Iterator[tuple[str, str, list]]:
    """(words that say where, role, its snippets): first all roles of `train`, then all of `test`."""
    if tff.is_hdf5(file):
        for split in SPLITS:
            part = tff.sibling(file, split, SPLITS)
            for role, examples in tff.read_clients(part, features=("snippets",)):
                yield str(part), role, list(examples["snippets"])
        return
    with tff.unpacked(file) as plain:
        for split in SPLITS:
            for role, examples in tff.read_clients(plain, split, ("snippets",)):
                yield f"{file}, split {split}", role, list(examples["snippets"])


def _decode(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise UserError(f"{where} is {value!r}; expected one text. Is the file from TensorFlow Federated?")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start + 1}, 0x{value[error.start]:02x}, is not UTF-8; convert the file to UTF-8"
        ) from error
