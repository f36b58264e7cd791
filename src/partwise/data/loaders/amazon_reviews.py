"""Amazon product reviews (McAuley): one JSON object per line, `.json` or `.json.gz`. A client is a reviewer.

A rating of 4 or 5 stars is positive, 1 to 3 negative. Tokens are those of LEAF (`text.leaf_tokens`), as for
tweets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partwise.data.loaders.json_lines import read_lines, read_object
from partwise.data.reading import guarded
from partwise.data.text.corpus import NEGATIVE, POSITIVE, Corpus, Text
from partwise.data.text.words import leaf_tokens
from partwise.types import UserError

LEAST_POSITIVE = 4  # stars
DOWNLOAD = "https://jmcauley.ucsd.edu/data/amazon (reviews_..._5.json.gz)"
EXPECTED = "a JSON object with reviewerID, overall, unixReviewTime, and mostly reviewText and summary"


def load(file: str | Path, summary: bool = True) -> Corpus:
    """The reviews of all users. With `summary`, a review's headline comes before its text.

    `reviewerID`, `overall` and `unixReviewTime` are required. `reviewText` or `summary` may be missing (as in
    some lines of the published files) and are then empty; both cases are counted. Reviews without any word
    are kept and counted. Bytes that are not UTF-8 become U+FFFD, and their lines are counted. Blank lines are
    ignored.
    """
    place = Path(file)

    def read(counts: Counter[str]) -> Iterator[Text]:
        for where, line in read_lines(place):
            yield _text(line, summary, where, counts)

    return Corpus(f"Amazon reviews {place}", guarded(place, read))


def _text(line: bytes, summary: bool, where: str, counts: Counter[str]) -> Text:
    decoded = line.decode("utf-8", "replace")
    counts["lines_not_utf8"] += "\ufffd" in decoded
    review = read_object(decoded, where, EXPECTED)
    client = review.get("reviewerID")
    if not isinstance(client, str) or not client:
        raise UserError(
            f"{where}: reviewerID is {client!r}; expected a reviewer's id. Mend or remove the line"
        )
    overall = _number(review, "overall", (1, 5), "1 to 5 stars", where)
    time = _number(review, "unixReviewTime", (0, 1e11), "seconds since 1970", where)
    said = leaf_tokens(_said(review, "reviewText", where, counts))
    headline = leaf_tokens(_said(review, "summary", where, counts)) if summary else []
    counts["without_token"] += not (said or headline)
    label = POSITIVE if overall >= LEAST_POSITIVE else NEGATIVE
    sentences = (" ".join(said),) if said else ()
    return Text(client, round(time * 1000), "review", " ".join(headline), sentences, (label,))


def _said(review: dict[str, Any], name: str, where: str, counts: Counter[str]) -> str:
    """A text that may be missing."""
    said = review.get(name)
    if said is not None and not isinstance(said, str):
        raise UserError(f"{where}: {name} is {said!r}; expected text. Mend or remove the line")
    counts[f"without_{name}"] += not (said or "").strip()
    return said or ""


def _number(
    review: dict[str, Any], name: str, limits: tuple[float, float], expected: str, where: str
) -> float:
    value = review.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not limits[0] <= value <= limits[1]:
        raise UserError(f"{where}: {name} is {value!r}; expected {expected}. Mend or remove the line")
    return value
