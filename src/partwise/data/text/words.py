"""From text to ids: HTML to plain text, to sentences of lower-cased tokens, to positions in a vocabulary.

The rules are those of the TFF Stack Overflow set (punctuation marks are separate tokens, but apostrophes and
hyphens stay inside words; an address becomes `<url>`), except that letters of all languages are kept.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

from partwise.data.reading import reading, regular
from partwise.types import UserError

FORMAT = "partwise-vocabulary"
VERSION = 1
MAX_LETTERS = 40  # of a token; longer ones are not words, and a table is as wide as its longest word
URL, EMAIL = "<url>", "<email>"
BLOCKS = frozenset(["p", "div", "br", "hr", "li", "ul", "ol", "dl", "dt", "dd", "blockquote", "pre"])
BLOCKS |= {"table", "tr", "td", "th", "h1", "h2", "h3", "h4", "h5", "h6"}
DROPPED = frozenset(["pre", "script", "style"])

_ADDRESS = re.compile(r"(?:https?://|\bwww\.)[^\s<>()\[\]\"]*[^\s<>()\[\]\".,;:!?']")
_TOKEN = re.compile(rf"{URL}|{EMAIL}|\w+(?:['-]\w+)*|[^\w\s\x00-\x1f\x7f\ud800-\udfff]")
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)[.!?][\"')\]]*(?=\s)", re.IGNORECASE)
_LETTER = re.compile(r"\w")
_LEAF_TOKEN = re.compile(r"[\w']+|[.,!?;]")


def plain_text(html: str) -> str:
    """The words of a post, one paragraph per line.

    Blocks of code (`<pre>`) are dropped, because they are not sentences and their names would fill a
    vocabulary. Code within a sentence stays. Entities are resolved.
    """
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return "".join(reader.pieces)


def tokens(text: str) -> list[str]:
    """Lower-cased words and punctuation marks, at most 40 letters each. Tokens joined by spaces give the same
    tokens again."""
    text = _ADDRESS.sub(f" {URL} ", text.lower().replace("\u2019", "'"))
    return [t if len(t) <= MAX_LETTERS else t[:MAX_LETTERS].rstrip("'-") for t in _TOKEN.findall(text)]


def is_word(token: str) -> bool:
    """Whether a token is more than a punctuation mark."""
    return bool(_LETTER.search(token))


def leaf_tokens(text: str) -> list[str]:
    """Tokens as LEAF makes them for Sentiment140: words with their apostrophes, and the marks . , ! ? ; as
    separate tokens. They are lower-cased and cut to 40 letters."""
    return [token[:MAX_LETTERS] for token in _LEAF_TOKEN.findall(text.lower())]


def sentences(text: str) -> Iterator[list[str]]:
    """The tokens of each sentence. Text with only punctuation marks is not a sentence. A sentence ends at the
    end of its line at the latest."""
    for sentence in _SENTENCE_END.sub(r"\g<0>\n", text).splitlines():
        found = tokens(sentence)
        if any(map(is_word, found)):
            yield found


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.dropping = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.dropping += tag in DROPPED
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.dropping = max(self.dropping - (tag in DROPPED), 0)
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.dropping:
            self.pieces.append(" ".join(data.splitlines()))


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Words (or tags), the most frequent first. The id of a word is its position."""

    words: tuple[str, ...]
    ids: Mapping[str, int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not self.words:
            raise UserError("the vocabulary is empty: give at least one word (is there any text to count?)")
        object.__setattr__(self, "ids", {word: k for k, word in enumerate(self.words)})
        if len(self.ids) < len(self.words):
            again = next(word for k, word in enumerate(self.words) if self.ids[word] != k)
            raise UserError(f"the vocabulary has {again!r} twice: give each word once")

    def __len__(self) -> int:
        return len(self.words)

    def find(self, words: Iterable[str]) -> list[int]:
        """The ids of the words that are in the vocabulary, in order. Other words are left out."""
        ids = self.ids
        return [ids[word] for word in words if word in ids]

    def save(self, path: str | Path) -> None:
        """Write a JSON file for `read_vocabulary`, for a client that is deployed elsewhere."""
        record = {"format": FORMAT, "version": VERSION, "words": self.words}
        Path(path).write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")


def vocabulary(counts: Mapping[str, int], size: int) -> Vocabulary:
    """The `size` most frequent words. Equally frequent words are in alphabetical order.

    If there are fewer words, all of them; the length of the vocabulary says how many there are.
    """
    if size < 1:
        raise UserError(f"a vocabulary of {size} words was asked for: give at least 1")
    if not counts:
        raise UserError("no word or tag was counted, so there is no vocabulary: give texts that have some")
    return Vocabulary(tuple(sorted(counts, key=lambda word: (-counts[word], word))[:size]))


def read_vocabulary(path: str | Path) -> Vocabulary:
    """A vocabulary from the file that `Vocabulary.save` wrote."""
    expected = "give a file of Vocabulary.save"
    file = regular(path, expected)
    with reading(file, expected):
        record = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") != VERSION:
        raise UserError(
            f"{path} is not a vocabulary: expected format '{FORMAT}', version {VERSION}; use Vocabulary.save"
        )
    words = record.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"the vocabulary {path} has no list of words: write it again with Vocabulary.save")
    return Vocabulary(tuple(words))
