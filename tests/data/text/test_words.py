from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data.text.words import (
    MAX_LETTERS,
    Vocabulary,
    plain_text,
    read_vocabulary,
    sentences,
    tokens,
    vocabulary,
)
from partwise.types import UserError


@pytest.mark.parametrize(
    ("html", "lines"),
    [
        ("<p>What is <em>this</em>?</p>\n\n<p>Hm.</p>\n", ["What is this?", "Hm."]),
        ("a<br>b<br/>c<hR>d", ["a", "b", "c", "d"]),
        ("<p>one\ntwo</p><ul><li>x</li><li>y</li></ul>", ["one two", "x", "y"]),
        ("<p>see <code>f(x)</code></p><pre><code>int y;\n</code></pre><p>end</p>", ["see f(x)", "end"]),
        ("R&amp;D &lt;b&gt; caf&#233; don&#39;t", ["R&D <b> café don't"]),
        ("a <script>var x</script>b", ["a b"]),
        ("stray </pre> tag", ["stray", "tag"]),
        ("1 < 2 and <a href='u'>link</a>", ["1 < 2 and link"]),
        ("", []),
    ],
)
def test_html_becomes_lines_without_blocks_of_code(html, lines):
    assert [line.strip() for line in plain_text(html).splitlines() if line.strip()] == lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Don't use C++, e.g. well-known",
            ["don't", "use", "c", "+", "+", ",", "e", ".", "g", ".", "well-known"],
        ),
        ("It\u2019s 'so'", ["it's", "'", "so", "'"]),
        ("see https://a.org/b?c=1&d, or (www.x.de)", ["see", "<url>", ",", "or", "(", "<url>", ")"]),
        ("Élan vital -- snake_case", ["élan", "vital", "-", "-", "snake_case"]),
        ("a\x00b \x7f", ["a", "b"]),
        ("x" * 99, ["x" * MAX_LETTERS]),
        ("x" * (MAX_LETTERS - 1) + "-y", ["x" * (MAX_LETTERS - 1)]),
        (" \n\t", []),
    ],
)
def test_tokens_by_hand(text, expected):
    assert tokens(text) == expected


@given(st.text(st.characters(codec="utf-8")) | st.text("aB1-'\u2019. \nwhtps:/<url>\0"))
def test_tokens_of_tokens_are_the_same(text):
    found = tokens(text)
    assert tokens(" ".join(found)) == found
    assert " ".join(found).split() == found
    assert all(0 < len(token) <= MAX_LETTERS for token in found)


def test_sentences_end_at_marks_and_lines():
    text = 'First one. Second (e.g. this) one! "Third?" fourth 3.5\nfifth\n\n...\n - \n'
    assert [" ".join(sentence) for sentence in sentences(text)] == [
        "first one .",
        "second ( e . g . this ) one !",
        '" third ? "',
        "fourth 3 . 5",
        "fifth",
    ]


@given(st.text(st.characters(codec="utf-8")) | st.text("ab1.!?\"')] \nw.htps:/"))
def test_sentences_hold_every_word_of_the_text_in_order(text):
    found = [token for sentence in sentences(text) for token in sentence]
    stream = [token for line in text.splitlines() for token in tokens(line)]
    assert [t for t in found if re.search(r"\w", t)] == [t for t in stream if re.search(r"\w", t)]
    rest = iter(stream)
    assert all(token in rest for token in found)


def test_a_vocabulary_is_the_most_frequent_then_the_alphabet():
    counts = Counter({"pear": 2, "fig": 5, "apple": 2, "plum": 1, "quince": 2})
    assert vocabulary(counts, 3).words == ("fig", "apple", "pear")
    assert vocabulary(counts, 99).words == ("fig", "apple", "pear", "quince", "plum")
    assert len(vocabulary(counts, 99)) == 5
    assert vocabulary(counts, 3).find(["plum", "pear", "fig", "pear"]) == [2, 0, 2]


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 3), min_size=1), st.integers(1, 9))
def test_a_vocabulary_does_not_depend_on_the_order_of_counting(counts, size):
    backwards = dict(reversed(counts.items()))
    assert vocabulary(counts, size) == vocabulary(backwards, size)


def test_a_vocabulary_returns_from_its_file(tmp_path):
    words = Vocabulary(("the", "café", '"', "<url>"))
    words.save(tmp_path / "words.json")
    assert read_vocabulary(tmp_path / "words.json") == words
    record = json.loads((tmp_path / "words.json").read_text(encoding="utf-8"))
    assert record == {"format": "partwise-vocabulary", "version": 1, "words": list(words.words)}


def test_bad_vocabularies_are_named(tmp_path):
    with pytest.raises(UserError, match="of 0 words was asked for: give at least 1"):
        vocabulary({"a": 1}, 0)
    with pytest.raises(UserError, match=r"no word or tag was counted.*give texts"):
        vocabulary({}, 5)
    with pytest.raises(UserError, match="vocabulary is empty"):
        Vocabulary(())
    with pytest.raises(UserError, match="has 'a' twice"):
        Vocabulary(("a", "b", "a"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"words.json (cannot be read|does not exist).*give a file of Vocabulary.save"),
        ("{", "cannot be read"),
        ("[1]", "is not a vocabulary: expected format 'partwise-vocabulary', version 1"),
        ('{"format": "partwise-vocabulary", "version": 2, "words": ["a"]}', "version 1"),
        ('{"format": "partwise-vocabulary", "version": 1, "words": [1]}', "has no list of words"),
    ],
)
def test_bad_vocabulary_files_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "words.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_vocabulary(tmp_path / "words.json")
