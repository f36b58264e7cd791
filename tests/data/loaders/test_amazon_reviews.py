from __future__ import annotations

import gzip
import json

import pytest

from partwise.data.loaders import amazon_reviews
from partwise.data.text.corpus import Text
from partwise.types import UserError

REVIEW = {
    "reviewerID": "A2",
    "asin": "1384719342",
    "helpful": [0, 0],
    "reviewText": "Not MUCH: it's fine.",
    "overall": 4.0,
    "summary": "good!",
    "unixReviewTime": 1393545600,
}
REVIEWS = [
    REVIEW,
    {**REVIEW, "overall": 3, "summary": None},
    {k: v for k, v in REVIEW.items() if k != "reviewText"} | {"reviewerID": "A1", "overall": 5},
    {**REVIEW, "reviewText": "", "summary": " :: ", "overall": 1.0},
]
SAID = "not much it's fine ."
EXPECTED = [
    Text("A2", 1393545600000, "review", "good !", (SAID,), ("positive",)),
    Text("A2", 1393545600000, "review", "", (SAID,), ("negative",)),
    Text("A1", 1393545600000, "review", "good !", (), ("positive",)),
    Text("A2", 1393545600000, "review", "", (), ("negative",)),
]


def lines(reviews) -> bytes:
    return b"".join(json.dumps(review).encode() + b"\n" for review in reviews)


def test_reviews_plain_and_packed(tmp_path):
    (tmp_path / "r.json").write_bytes(lines(REVIEWS) + b"\n")
    (tmp_path / "r.json.gz").write_bytes(gzip.compress(lines(REVIEWS)))
    for name in ("r.json", "r.json.gz"):
        corpus = amazon_reviews.load(tmp_path / name)
        assert list(corpus) == EXPECTED
        assert corpus.counts == {
            "texts": 4,
            "clients": 2,
            "lines_not_utf8": 0,
            "without_reviewText": 2,
            "without_summary": 1,
            "without_token": 1,
        }
    assert [text.title for text in amazon_reviews.load(tmp_path / "r.json", summary=False)] == [""] * 4


def test_bytes_that_are_not_utf8_are_counted(tmp_path):
    (tmp_path / "r.json").write_bytes(lines(REVIEWS[:2]).replace(b"fine", b"f\xffne", 1))
    corpus = amazon_reviews.load(tmp_path / "r.json")
    first, _ = corpus
    assert first.sentences == ("not much it's f ne .",)  # U+FFFD is neither letter nor mark
    assert corpus.counts["lines_not_utf8"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'reviewerID': 'A'}", r"line 3 is not JSON .*expected a JSON object with reviewerID"),
        (b"[1]", r"line 3 is '\[1\]'; expected a JSON object"),
        (lines([{**REVIEW, "reviewerID": ""}]), r"line 3: reviewerID is ''; expected a reviewer's id"),
        (lines([{"reviewerID": "A"}]), r"line 3: overall is None; expected 1 to 5 stars"),
        (lines([{**REVIEW, "overall": 0}]), r"line 3: overall is 0; expected 1 to 5"),
        (lines([{**REVIEW, "overall": True}]), r"line 3: overall is True"),
        (lines([{**REVIEW, "overall": float("nan")}]), r"line 3: overall is nan"),
        (
            lines([{**REVIEW, "unixReviewTime": "soon"}]),
            r"line 3: unixReviewTime is 'soon'; expected seconds",
        ),
        (lines([{**REVIEW, "reviewText": 7}]), r"line 3: reviewText is 7; expected text"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    (tmp_path / "r.json").write_bytes(lines(REVIEWS[:1]) + b"\n" + line)
    with pytest.raises(UserError, match=message):
        list(amazon_reviews.load(tmp_path / "r.json"))


def test_the_real_reviews(data_root):
    file = data_root / "amazon-musical-instruments" / "reviews_Musical_Instruments_5.json.gz"
    corpus = amazon_reviews.load(file)
    positive = sum(text.tags == ("positive",) for text in corpus)
    assert (corpus.counts["texts"], corpus.counts["clients"]) == (10_261, 1429)  # data/README.md
    assert positive == 2084 + 6938
    assert corpus.counts["without_reviewText"] == 7
