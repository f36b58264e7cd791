"""Stack Exchange: the texts of a dump's users, from `Posts.xml` of any site or from the same rows as Parquet.

A client is a user of a site, `site/OwnerUserId`. Ids of different sites are unrelated, but tags with the same
name are one tag.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet

from partwise.data.arrow import to_texts
from partwise.data.checks import check_known
from partwise.data.loaders.locate import data_root, held_by
from partwise.data.reading import reading, regular
from partwise.data.text.corpus import Corpus, Text, milliseconds
from partwise.data.text.words import plain_text, sentences, tokens
from partwise.types import UserError

KINDS = {1: "question", 2: "answer"}
POST = ("Id", "PostTypeId", "ParentId", "CreationDate", "Body", "OwnerUserId", "Title", "Tags")
COMMENT = ("Id", "CreationDate", "Text", "UserId")
COMMUNITY = -1  # the account of the site itself
ROWS_AT_ONCE = 1024
DUMPS = "https://archive.org/details/stackexchange (unpack the .7z)"

Tags = dict[tuple[str, int], tuple[str, ...]]


class Row(NamedTuple):
    """A row of a dump, its site, and words that say where it is."""

    site: str
    fields: dict[str, Any]
    where: str

    def number(self, name: str) -> int | None:
        value = self.fields.get(name)
        try:
            return None if value is None or value == "" else int(value)
        except ValueError as error:
            raise UserError(f"{self.where}: {name} is {value!r}; expected a whole number") from error

    def required(self, name: str) -> Any:
        value = self.fields.get(name)
        if value is None or value == "":
            raise UserError(f"{self.where} has no {name}: mend the row, or download the dump again")
        return value


def load(
    path: str | Path | None = None,
    site: str | None = None,
    comments: bool = False,
    answer_tags: bool = True,
) -> Corpus:
    """The questions and answers of all users, and with `comments` their comments too.

    `path` is `Posts.xml`, `posts.parquet`, a folder with one of them, or a folder with a folder per site.
    Without it, the environment variable PARTWISE_DATA says where to look. The name of a site is in the column
    `Site`, or is `site`, or is the name of the folder of its `Posts.xml`.

    Only questions have tags. With `answer_tags`, an answer has the tags of its question, as in the TFF set.
    This gives about three times as many examples. Only the tags of all questions are held in memory.

    A post is left out and counted if it has no owner (deleted users), belongs to the site's own account, is
    neither question nor answer, or has no word outside blocks of code and pictures.
    """
    files = _locate(path)
    beside = [_comments_of(file) for file in files] if comments else []
    if site is not None and len(files) > 1:
        raise UserError(f"site is {site!r}, but there are {len(files)} sites in {path}: give one Posts.xml")
    question_tags = _question_tags(files, site) if answer_tags else {}

    def read(counts: Counter[str]) -> Iterator[Text]:
        for file in files:
            with reading(file):
                for row in _rows(file, POST, site):
                    yield from _post(row, question_tags if answer_tags else None, counts)
        for file in beside:
            with reading(file):
                for row in _rows(file, COMMENT, site):
                    yield from _comment(row, counts)

    return Corpus(f"Stack Exchange {', '.join(map(str, files))}", read)


def _post(row: Row, question_tags: Tags | None, counts: Counter[str]) -> Iterator[Text]:
    counts["posts"] += 1
    kind = KINDS.get(row.number("PostTypeId") or 0)
    if kind is None:
        counts["dropped_other_post_type"] += 1
        return
    tags = split_tags(row.fields.get("Tags") or "", row.where)
    if kind == "answer" and question_tags is not None:
        question = (row.site, row.number("ParentId") or 0)
        counts["answers_without_question"] += question not in question_tags
        tags = question_tags.get(question, ())
    title = " ".join(tokens(row.fields.get("Title") or ""))
    yield from _text(row, kind, "OwnerUserId", title, plain_text(row.fields.get("Body") or ""), tags, counts)


def _comment(row: Row, counts: Counter[str]) -> Iterator[Text]:
    """A comment. Comments are plain text, not HTML."""
    counts["comments"] += 1
    yield from _text(row, "comment", "UserId", "", row.fields.get("Text") or "", (), counts)


def _text(
    row: Row, kind: str, owner: str, title: str, body: str, tags: tuple[str, ...], counts: Counter[str]
) -> Iterator[Text]:
    user = row.number(owner)
    if user is None or user == COMMUNITY:
        counts["dropped_no_owner" if user is None else "dropped_community_account"] += 1
        return
    found = tuple(" ".join(sentence) for sentence in sentences(body))
    if not found and not title:
        counts["dropped_no_words"] += 1
        return
    time = milliseconds(row.required("CreationDate"), row.where)
    yield Text(f"{row.site}/{user}", time, kind, title, found, tags)


def split_tags(text: str, where: str = "Tags") -> tuple[str, ...]:
    """`<a><b>` and `|a|b|` are the tags a and b."""
    if not re.fullmatch(r"(<[^<>|]+>)*|\|?[^<>|]+(\|[^<>|]+)*\|?|\|", text):
        raise UserError(f"{where}: Tags is {text!r}; expected <a><b> or |a|b|")
    return tuple(re.findall(r"[^<>|]+", text))


def _question_tags(files: list[Path], site: str | None) -> Tags:
    tags: Tags = {}
    for file in files:
        with reading(file):
            for row in _rows(file, ("Id", "PostTypeId", "Tags"), site):
                if row.number("PostTypeId") == 1:
                    number = int(row.required("Id"))
                    tags[row.site, number] = split_tags(row.fields.get("Tags") or "", row.where)
    return tags


def _rows(file: Path, names: tuple[str, ...], site: str | None) -> Iterator[Row]:
    read: Callable[..., Iterator[Row]] = _read_parquet if file.suffix == ".parquet" else _read_xml
    return read(file, names, site)


def _read_parquet(file: Path, names: tuple[str, ...], site: str | None) -> Iterator[Row]:
    with reading(file, "is it a whole .parquet file?"), pyarrow.parquet.ParquetFile(file) as source:
        wanted = [*names, *([] if site else ["Site"])]
        check_known(wanted, source.schema_arrow.names)
        first_row = 0
        for batch in source.iter_batches(ROWS_AT_ONCE, columns=wanted):
            columns = [to_texts(name, batch[name], first_row) for name in wanted]
            for values in zip(*columns, strict=True):
                fields = dict(zip(wanted, values, strict=True))
                where = f"{file}, row with Id {fields['Id']}"
                yield Row(site or fields["Site"], fields, where)
            first_row += batch.num_rows


def _read_xml(file: Path, names: tuple[str, ...], site: str | None) -> Iterator[Row]:
    """One row after the other. Rows that were read are freed, so memory does not grow with the file."""
    name = site or file.resolve().parent.name
    try:
        with file.open("rb") as source:
            events = xml.etree.ElementTree.iterparse(source, events=("start", "end"))
            _, root = next(events)
            for event, element in events:
                if event == "end" and element.tag == "row":
                    yield Row(name, dict(element.attrib), f"{file}, row with Id {element.get('Id')}")
                    root.clear()
    except xml.etree.ElementTree.ParseError as error:
        line = error.position[0]
        raise UserError(
            f"{file}, line {line}: {error}; expected a dump's <row .../> lines. Unpack it again"
        ) from error
    except (LookupError, ValueError) as error:
        raise UserError(
            f"{file}, line 1: the file's encoding cannot be read ({error}): a dump is UTF-8. Unpack it again"
        ) from error


def _locate(path: str | Path | None) -> list[Path]:
    how = f"download one from {DUMPS} and pass its folder"
    expected = f"give a dump's Posts.xml or its folder, see {DUMPS}"
    root = data_root(path, "a Stack Exchange dump", how, expected)
    if not root.is_dir():
        if regular(root, expected).suffix not in (".xml", ".parquet"):
            raise UserError(f"{root} is neither .xml nor .parquet: unpack the dump and give its Posts.xml")
        return [root]
    for folder in (root, root / "stackexchange"):
        for pattern in ("posts.parquet", "Posts.xml", "*/Posts.xml"):
            if found := sorted(folder.glob(pattern)):
                return found
    raise UserError(
        f"{root} holds no posts.parquet, Posts.xml or folders with a Posts.xml, but {held_by(root)}: see {DUMPS}"
    )


def _comments_of(posts: Path) -> Path:
    file = posts.with_name("comments.parquet" if posts.suffix == ".parquet" else "Comments.xml")
    if not file.is_file():
        raise UserError(f"there is no {file.name} beside {posts}: put it there, or leave out the comments")
    return file
