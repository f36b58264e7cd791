from __future__ import annotations

import itertools
from xml.sax.saxutils import quoteattr

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.data.loaders import stackexchange
from partwise.data.text.corpus import Text
from partwise.data.text.sentences import split_sentence_stores
from partwise.data.text.tag_bags import split_tag_stores
from partwise.types import UserError

NAMES = ("Id", "PostTypeId", "ParentId", "CreationDate", "Score", "Body", "OwnerUserId", "Title", "Tags")
DAY = "1970-01-01T00:00:0{}.000"
# The answer stands before its question: a dump may be sorted in any way.
POSTS = [
    (2, 2, 1, DAY.format(2), 3, "<p>Use <code>f()</code>.</p><pre>x</pre>", 7, None, None),
    (1, 1, None, DAY.format(1), 0, "<p>How? I don't know.</p>", 8, "Why &lt; so?", "<a><b-c>"),
    (3, 1, None, DAY.format(3), 0, "<p>Gone</p>", None, "Gone", "|a|"),
    (4, 2, 1, DAY.format(4), 0, "<p>Ours</p>", -1, None, None),
    (5, 5, None, DAY.format(5), 0, "<p>Wiki</p>", 7, None, None),
    (6, 2, 99, DAY.format(6), 0, "<p>Orphan</p>", 7, None, None),
    (9, 2, 1, DAY.format(7), 0, "<pre>code only</pre>", 7, None, None),
]
COMMENTS = [(1, 2, "Thanks <3 & bye", DAY.format(8), 8), (2, 2, "Lost", DAY.format(9), None)]
EXPECTED = [
    Text("beer/7", 2000, "answer", "", ("use f ( ) .",), ("a", "b-c")),
    Text("beer/8", 1000, "question", "why & lt ; so ?", ("how ?", "i don't know ."), ("a", "b-c")),
    Text("beer/7", 6000, "answer", "", ("orphan",), ()),
    Text("beer/8", 8000, "comment", "", ("thanks < 3 & bye",), ()),
]
COUNTS = {
    "texts": 4,
    "clients": 2,
    "posts": 7,
    "comments": 2,
    "dropped_no_owner": 2,
    "dropped_community_account": 1,
    "dropped_other_post_type": 1,
    "dropped_no_words": 1,
    "answers_without_question": 1,
}


def to_xml(kind, names, rows) -> str:
    lines = []
    for row in rows:
        fields = [f"{n}={quoteattr(str(v))}" for n, v in zip(names, row, strict=True) if v is not None]
        lines.append(f"  <row {' '.join(fields)} />")
    body = "\n".join(lines)
    return f'\ufeff<?xml version="1.0" encoding="utf-8"?>\n<{kind}>\n{body}\n</{kind}>'


def to_parquet(file, names, rows):
    columns = {name: [row[k] for row in rows] for k, name in enumerate(names)}
    pyarrow.parquet.write_table(pa.table({"Site": ["beer"] * len(rows), **columns}), file)


@pytest.fixture
def dump(tmp_path):
    """An unpacked dump of the site beer."""
    folder = tmp_path / "dumps" / "beer"
    folder.mkdir(parents=True)
    (folder / "Posts.xml").write_text(to_xml("posts", NAMES, POSTS), encoding="utf-8")
    names = ("Id", "PostId", "Text", "CreationDate", "UserId")
    (folder / "Comments.xml").write_text(to_xml("comments", names, COMMENTS), encoding="utf-8")
    return folder


@pytest.fixture
def table(tmp_path):
    """The same rows as Parquet."""
    folder = tmp_path / "root" / "stackexchange"
    folder.mkdir(parents=True)
    to_parquet(folder / "posts.parquet", NAMES, POSTS)
    to_parquet(folder / "comments.parquet", ("Id", "PostId", "Text", "CreationDate", "UserId"), COMMENTS)
    return folder


def test_xml_and_parquet_give_the_same_texts(dump, table, monkeypatch):
    monkeypatch.setenv("PARTWISE_DATA", str(table.parent))
    for place in (dump, dump / "Posts.xml", dump.parent, table, table / "posts.parquet", table.parent, None):
        corpus = stackexchange.load(place, comments=True)
        assert list(corpus) == EXPECTED
        assert corpus.counts == COUNTS
    assert list(stackexchange.load(dump)) == EXPECTED[:3]


def test_answers_may_do_without_tags(dump):
    texts = list(stackexchange.load(dump, answer_tags=False))
    assert [text.tags for text in texts] == [(), ("a", "b-c"), ()]


def test_a_site_can_be_named(dump, table):
    for place in (dump, table):
        assert {text.client for text in stackexchange.load(place, site="ale")} == {"ale/7", "ale/8"}


def test_a_folder_of_sites_keeps_users_and_questions_apart(dump):
    other = dump.parent / "ale"
    other.mkdir()
    (other / "Posts.xml").write_text(to_xml("posts", NAMES, POSTS[:1]), encoding="utf-8")
    texts = list(stackexchange.load(dump.parent))
    assert [(text.client, text.tags) for text in texts[:2]] == [("ale/7", ()), ("beer/7", ("a", "b-c"))]
    with pytest.raises(UserError, match="site is 'x', but there are 2 sites in"):
        stackexchange.load(dump.parent, site="x")


@pytest.mark.parametrize(
    ("text", "tags"),
    [("", ()), ("<a><b>", ("a", "b")), ("|a|b|", ("a", "b")), ("|c++|", ("c++",)), ("a", ("a",))],
)
def test_both_spellings_of_tags(text, tags):
    assert stackexchange.split_tags(text) == tags


def test_bad_tags_are_named():
    with pytest.raises(UserError, match=r"here: Tags is '<a><b'; expected <a><b> or \|a\|b\|"):
        stackexchange.split_tags("<a><b", "here")


def test_malformed_xml_names_file_and_line(dump):
    lines = (dump / "Posts.xml").read_text(encoding="utf-8").splitlines()
    (dump / "Posts.xml").write_text("\n".join([*lines[:4], "  <row Id=5 />", *lines[4:]]), encoding="utf-8")
    with pytest.raises(UserError, match=r"Posts.xml, line 5: not well-formed .*expected a dump's <row"):
        stackexchange.load(dump)
    (dump / "Posts.xml").write_text("\n".join(lines[:6]), encoding="utf-8")
    with pytest.raises(UserError, match=r"Posts.xml, line 6: no element found"):
        stackexchange.load(dump)
    (dump / "Posts.xml").write_text("")
    with pytest.raises(UserError, match=r"Posts.xml, line 1: no element found"):
        stackexchange.load(dump)


def test_text_that_is_not_utf8_names_file_and_place(dump, table):
    whole = to_xml("posts", NAMES, POSTS).encode()
    (dump / "Posts.xml").write_bytes(whole.replace(b"don't", b"don\x92t"))
    with pytest.raises(UserError, match=r"Posts.xml, line 4: not well-formed"):
        stackexchange.load(dump)
    (dump / "Posts.xml").write_bytes(whole.replace(b'"utf-8"', b'"klingon"').removeprefix(b"\xef\xbb\xbf"))
    with pytest.raises(
        UserError, match=r"Posts.xml, line 1: the file's encoding cannot be read \(unknown enc"
    ):
        stackexchange.load(dump)
    posts = pyarrow.parquet.read_table(table / "posts.parquet")
    at = posts.schema.names.index("Body")
    body = [b"\xff!" if k == 2 else b"fine" for k in range(posts.num_rows)]
    offsets = np.cumsum([0, *map(len, body)]).astype(np.int32)
    said = pa.StringArray.from_buffers(len(body), pa.py_buffer(offsets), pa.py_buffer(b"".join(body)))
    pyarrow.parquet.write_table(posts.set_column(at, "Body", said), table / "posts.parquet")
    with pytest.raises(
        UserError, match=r"posts.parquet: column 'Body' has 1 texts that are not UTF-8.* row 2"
    ):
        list(stackexchange.load(table))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("OwnerUserId", "me", r"row with Id 1: OwnerUserId is 'me'; expected a whole number"),
        ("PostTypeId", "q", r"row with Id 1: PostTypeId is 'q'"),
        ("CreationDate", "soon", r"row with Id 1: date 'soon'; expected"),
        ("CreationDate", None, r"row with Id 1 has no CreationDate: mend the row"),
        ("Id", None, r"row with Id None has no Id"),
        ("Tags", "<a", r"row with Id 1: Tags is '<a'"),
    ],
)
def test_bad_fields_are_named(dump, field, value, message):
    row = list(POSTS[1])
    row[NAMES.index(field)] = value
    (dump / "Posts.xml").write_text(to_xml("posts", NAMES, [row]), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        list(stackexchange.load(dump))


def test_bad_parquet_is_named(table):
    to_parquet(table / "posts.parquet", NAMES[:-1], [row[:-1] for row in POSTS])
    with pytest.raises(UserError, match=r"posts.parquet: unknown column 'Tags'"):
        stackexchange.load(table)
    (table / "posts.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"posts.parquet cannot be read .*whole .parquet file"):
        stackexchange.load(table)


def test_bad_places_are_named(dump, tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    with pytest.raises(UserError, match=r"no path to a Stack Exchange dump.*set PARTWISE_DATA"):
        stackexchange.load()
    with pytest.raises(UserError, match=r"nowhere does not exist: give a dump's Posts.xml"):
        stackexchange.load(tmp_path / "nowhere")
    (tmp_path / "beer.7z").write_bytes(b"7z")
    with pytest.raises(UserError, match=r"beer.7z is neither .xml nor .parquet: unpack"):
        stackexchange.load(tmp_path / "beer.7z")
    with pytest.raises(UserError, match=r"holds no posts.parquet, Posts.xml .*but beer.7z, dumps"):
        stackexchange.load(tmp_path)
    (dump / "Comments.xml").unlink()
    with pytest.raises(UserError, match=r"no Comments.xml beside .*leave out the comments"):
        stackexchange.load(dump, comments=True)


def test_memory_does_not_grow_with_the_file(dump):
    row = to_xml("posts", NAMES, [(*POSTS[0][:5], "<p>word</p>" * 500, *POSTS[0][6:])]).splitlines()
    (dump / "Posts.xml").write_text("\n".join([*row[:2], *(row[2:3] * 4000), row[3]]), encoding="utf-8")
    assert (dump / "Posts.xml").stat().st_size > 40e6
    process, rows = psutil.Process(), stackexchange._rows(dump / "Posts.xml", NAMES, None)
    assert len([row.number("Id") for row in itertools.islice(rows, 100)]) == 100
    before = process.memory_info().rss
    assert sum(row.number("Id") == 2 for row in rows) == 3900
    assert process.memory_info().rss - before < 15e6


def test_the_real_posts(data_root):
    corpus = stackexchange.load(data_root).hold()
    train, validation, test = split_tag_stores(corpus, num_words=10_000, num_tags=500)
    assert corpus.counts["posts"] == 10_987
    assert corpus.counts["dropped_other_post_type"] == 702  # data/README.md: 348 + 348 tag wikis, 6 of type 7
    assert corpus.counts["answers_without_question"] == 0
    assert (train.num_keys("words"), train.num_keys("tags")) == (10_000, 500)
    assert train.num_clients > 2000
    assert not set(train.client_ids) & set(validation.client_ids)
    assert not set(train.client_ids) & set(test.client_ids)
    bag = train.columns["words"]
    assert (bag.min(), bag.max()) == (-1, 9999)
    assert np.all((bag >= 0).any(1))
    assert np.all(train.columns["tags"][:, 0] >= 0)
    said, *_ = split_sentence_stores(corpus, num_words=1000)
    assert said.columns["tokens"].shape[1] == 21
    assert np.all(said.columns["tokens"][:, 0] == 1501)
    assert said.counts.max() <= 1000
