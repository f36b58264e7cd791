"""Blog Authorship Corpus (Schler et al., 2006): a file of posts for every blogger, as it is distributed.

Files are called `ID.gender.age.industry.sign.xml`, in a folder or in a zip. A client is a blogger, by its ID.
A file has `<Blog>`, then for each post `<date>31,May,2004</date>` and `<post>...</post>`.

The files are not well-formed XML (bare `&` and `<`) and are in several encodings. So they are read by these
rules. A file that is not UTF-8 is taken for Windows-1252, of which Latin-1 is a part. A post begins at
`<post>` and ends at `</post>`, at the next `<date>`, or with the file. What is in it is text; entities are
resolved. A date in another form than the one above is no date, and such posts are placed before all others.
"""

from __future__ import annotations

import html
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from partwise.data.loaders.locate import data_root, held_by
from partwise.data.loaders.packed import open_member
from partwise.data.reading import is_there, reading
from partwise.data.text.corpus import Corpus, Text
from partwise.data.text.words import EMAIL, URL, is_word, sentences
from partwise.types import UserError

HOW = "give the folder of its files ID.gender.age.industry.sign.xml, or a zip of them"
FEWEST, MOST = 3, 60  # words of a sentence
UNDATED = -(2**62)  # milliseconds: before all dates, also those before 1970
DAY = 86_400_000
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
LINK = "urlLink"  # what the corpus has in place of a link

_NAME = re.compile(r"(\w+)\.(?:male|female|unknown)\.\d*\.[^.]*\.[^.]*\.xml", re.IGNORECASE)
_DATE = re.compile(r"\s*(\d{1,2}),([a-z]+),(\d{4})\s*", re.IGNORECASE)
_PIECE = re.compile(
    r"<date>(?P<date>[^<]*)</date>|<post>(?P<post>.*?)(?:</post>|(?=<date>)|\Z)", re.IGNORECASE | re.DOTALL
)
_MAIL = re.compile(r"[\w.+-]+@\w[\w-]*(?:\.\w[\w-]*)+")


class Post(NamedTuple):
    """A post, and when it was written: milliseconds since 1970, or UNDATED."""

    time: int
    text: str


def load(path: str | Path | None = None) -> Corpus:
    """The posts of all bloggers, each blogger's in order of time.

    Sentences have 3 to 60 words. Shorter and longer ones are left out and counted, and so are sentences that
    a blogger wrote before, posts without a sentence, and files without a post. Addresses are `<email>` and
    `<url>`. `path` is the folder, a zip, or one of the files. Without it, PARTWISE_DATA says where to look.
    """
    root = data_root(path, "the Blog Authorship Corpus", HOW, HOW)

    def read(counts: Counter[str]) -> Iterator[Text]:
        files: dict[str, str] = {}
        with reading(root):
            for name, data in _files(root):
                counts["files"] += 1
                blogger = PurePosixPath(name).name.split(".")[0]
                if blogger in files:
                    raise UserError(
                        f"{root}: {files[blogger]} and {name} are both of blogger {blogger}; expected one file for "
                        "each: remove one of them"
                    )
                files[blogger] = name
                yield from _texts(blogger, data, counts)
        if not counts["posts"]:
            raise UserError(f"{root} has no <post> in its {counts['files']} files: {HOW}")

    return Corpus(f"blogs {root}", read)


def locate(path: str | Path | None) -> Path | None:
    """The path, if it is a folder or a zip with files of the corpus, or such a file. Otherwise None."""
    if path is None:
        return None
    source = Path(path).expanduser()
    if source.is_dir():
        return source if next(_in_folder(source), None) else None
    if source.suffix.lower() == ".zip" and is_there(source) and zipfile.is_zipfile(source):
        with reading(source), zipfile.ZipFile(source) as archive:
            return source if _members(archive) else None
    return source if _NAME.fullmatch(source.name) else None


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    """(name of the file, its bytes), in the order of names."""
    if root.is_dir():
        files = sorted(_in_folder(root))
        if not files:
            raise UserError(f"{root} holds no file of the corpus, but {held_by(root)}: {HOW}")
        for file in files:
            with reading(file):
                yield file.name, file.read_bytes()
    elif _NAME.fullmatch(root.name):
        yield root.name, root.read_bytes()
    else:
        with zipfile.ZipFile(root) as archive:
            members = _members(archive)
            if not members:
                raise UserError(f"{root} holds no file of the corpus: {HOW}")
            for member in members:
                with open_member(archive, member, root, root.stat().st_size) as file:
                    yield member, file.read()


def _in_folder(folder: Path) -> Iterator[Path]:
    with reading(folder), os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_file():
                yield folder / entry.name


def _members(archive: zipfile.ZipFile) -> list[str]:
    return sorted(name for name in archive.namelist() if _NAME.fullmatch(PurePosixPath(name).name))


def _texts(blogger: str, data: bytes, counts: Counter[str]) -> Iterator[Text]:
    """A blogger's posts, as far as they have new sentences."""
    posts = sorted(_posts(_decode(data, counts), counts), key=lambda post: post.time)
    counts["files_without_post"] += not posts
    counts["posts"] += len(posts)
    seen: set[str] = set()
    for post in posts:
        found = tuple(_new_sentences(post.text, seen, counts))
        if found:
            yield Text(blogger, post.time, "post", "", found, ())
        else:
            counts["dropped_no_sentence"] += 1


def _decode(data: bytes, counts: Counter[str]) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        counts["files_not_utf8"] += 1
        return data.decode("cp1252", "replace")


def _posts(text: str, counts: Counter[str]) -> Iterator[Post]:
    time = UNDATED
    for piece in _PIECE.finditer(text):
        if piece["post"] is None:
            time = _milliseconds(piece["date"])
            continue
        counts["posts_without_date"] += time == UNDATED
        yield Post(time, html.unescape(piece["post"]))
        time = UNDATED


def _milliseconds(text: str) -> int:
    found = _DATE.fullmatch(text)
    month = found[2].lower()[:3] if found else ""
    if not found or month not in MONTHS:
        return UNDATED
    try:
        day = date(int(found[3]), MONTHS.index(month) + 1, int(found[1]))
    except ValueError:
        return UNDATED
    return (day - date(1970, 1, 1)).days * DAY


def _new_sentences(text: str, seen: set[str], counts: Counter[str]) -> Iterator[str]:
    text = _MAIL.sub(f" {EMAIL} ", text.replace(LINK, f" {URL} "))
    for found in sentences(text):
        sentence, size = " ".join(found), sum(map(is_word, found))
        if not FEWEST <= size <= MOST:
            counts["dropped_short_sentences" if size < FEWEST else "dropped_long_sentences"] += 1
        elif sentence in seen:
            counts["dropped_repeated_sentences"] += 1
        else:
            seen.add(sentence)
            yield sentence
