"""The Blog Authorship Corpus in its own format, and tables of sentences; all of it generated."""

from __future__ import annotations

import decimal
import zipfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from partwise.data import open_store
from partwise.data.loaders import blogs, sentence_table
from partwise.data.text.corpus import Corpus, Text
from partwise.data.text.numbered import number_sentences, with_vocabulary
from partwise.data.text.sentences import sentence_store, sentence_vocabulary, split_sentence_stores
from partwise.tasks.language import find_corpus
from partwise.types import UserError

DAY = 86_400_000
FIRST = "101.male.24.indUnk.Leo.xml"
SECOND = "202.female.17.Student.Aries.xml"
BLOG = """<Blog>

<date>02,January,1970</date>
<post>
   Ants & bees <3 honey. See urlLink there now! Two words.
   Write to ant@hill.example at once &amp; wait.
</post>
<date>01,January,1970</date>
<post>\tAn older sentence here.</post>
<date>3,Brumaire,2004</date>
<post>Nobody knows when this was.
<date>30,February,2004</date>
<post>An older sentence here. And this one too.</post>
<date>05,may,2004</date>
<post>...</post>
</Blog>"""
EXPECTED = [
    Text("101", blogs.UNDATED, "post", "", ("nobody knows when this was .",), ()),
    Text("101", blogs.UNDATED, "post", "", ("an older sentence here .", "and this one too ."), ()),
    Text(
        "101",
        DAY,
        "post",
        "",
        ("ants & bees < 3 honey .", "see <url> there now !", "write to <email> at once & wait ."),
        (),
    ),
]
COUNTS = {
    "posts": 6,
    "posts_without_date": 2,
    "files": 2,
    "files_not_utf8": 1,
    "files_without_post": 0,
    "dropped_short_sentences": 1,
    "dropped_long_sentences": 1,
    "dropped_repeated_sentences": 1,
    "dropped_no_sentence": 2,
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "corpus"
    path.mkdir()
    (path / FIRST).write_text(BLOG)
    second = f"<Blog><date>05,May,2004</date><post>It\x92s caf\xe9 time. {'long ' * 61}.</post></Blog>"
    (path / SECOND).write_bytes(second.encode("latin-1"))
    (path / "readme.txt").write_text("no blog")
    return path


@pytest.fixture
def packed(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "blogs.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in folder.iterdir():
            archive.write(file, f"blogs/{file.name}")
    return tmp_path / "blogs.zip"


def test_posts_in_order_of_time_from_folder_and_zip(folder, packed):
    for place in (folder, packed):
        corpus = blogs.load(place)
        texts = list(corpus)
        assert texts[:3] == EXPECTED
        assert texts[3] == Text("202", 12_543 * DAY, "post", "", ("it's café time .",), ())
        assert {name: corpus.counts[name] for name in COUNTS} == COUNTS
        assert corpus.counts["clients"] == 2


def test_dates_before_1970_are_dates(tmp_path):
    """Posts without a date are before them, and the store has them in this order."""
    dates = ("02,January,1970", "31,December,1969", "never", "01,May,1066", "30,December,1969")
    posts = [f"<date>{date}</date><post>Sentence number {k} here</post>" for k, date in enumerate(dates)]
    (tmp_path / FIRST).write_text(f"<Blog>{''.join(posts)}</Blog>")
    corpus = blogs.load(tmp_path)
    texts = list(corpus)
    assert [text.sentences[0].split()[2] for text in texts] == ["2", "3", "4", "1", "0"]
    assert [text.time // DAY for text in texts[2:]] == [-2, -1, 1]
    assert corpus.counts["posts_without_date"] == 1
    words = sentence_vocabulary(texts)
    store = sentence_store(Corpus.of(texts[::-1]), words)
    assert [words.words[k - 1] for k in store.columns["tokens"][:, 3]] == ["2", "3", "4", "1", "0"]


def test_only_a_path_of_its_own_is_taken(folder, packed, tmp_path):
    assert blogs.locate(None) is None
    assert blogs.locate(tmp_path) is None
    assert blogs.locate(tmp_path / "Posts.xml") is None
    for place in (folder, packed, folder / FIRST):
        assert blogs.locate(str(place)) == place
        assert sentence_table.locate(place) is None


def test_what_is_no_corpus_is_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds no file of the corpus, but nothing: give the folder"):
        list(blogs.load(tmp_path / "empty"))
    with pytest.raises(UserError, match="gone does not exist: give the folder"):
        blogs.load(tmp_path / "gone")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    assert blogs.locate(tmp_path / "other.zip") is None
    with pytest.raises(UserError, match=r"other.zip holds no file of the corpus"):
        list(blogs.load(tmp_path / "other.zip"))
    for file in folder.glob("*.xml"):
        file.write_text("<Blog></Blog>")
    with pytest.raises(UserError, match=r"corpus has no <post> in its 2 files"):
        list(blogs.load(folder))


def test_two_files_of_one_blogger_are_refused(folder, packed):
    """Their sentences would be there twice."""
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr(f"copy/{FIRST}", BLOG)
    with pytest.raises(UserError, match=rf"blogs/{FIRST} and copy/{FIRST} are both of blogger 101"):
        list(blogs.load(packed))
    (folder / FIRST.replace("male", "female")).write_text(BLOG)
    with pytest.raises(UserError, match=r"are both of blogger 101; expected one file for each: remove one"):
        list(blogs.load(folder))


SAID = pa.table(
    {
        "user": [7, 8, 7, 7],
        "rank": [2, 0, 0, 1],
        "day": [5, 6, 7, 8],
        "text": ["third it is .", "Hello there, you!", "first <url> here", "--"],
    }
)


def write(table, path):
    if path.suffix == ".csv":
        rows = [",".join(f'"{value}"' for value in row.values()) for row in table.to_pylist()]
        path.write_text("\n".join([",".join(table.column_names), *rows, ""]))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        pyarrow.feather.write_feather(table, path)
    return path


@pytest.mark.parametrize("name", ["sentences.parquet", "sentences.csv", "sentences.arrow"])
def test_tables_of_sentences_in_order_of_rank(tmp_path, name):
    file = write(SAID, tmp_path / name)
    for place in (file, tmp_path):
        assert sentence_table.locate(place) == file
        corpus = sentence_table.load(place)
        assert list(corpus) == [
            Text("7", 0, "sentence", "", ("first <url> here", "third it is ."), ()),
            Text("8", 0, "sentence", "", ("hello there , you !",), ()),
        ]
        assert corpus.counts == {"texts": 2, "clients": 2, "rows": 4, "dropped_no_words": 1}


def test_without_rank_the_day_or_the_row_decides(tmp_path):
    first = lambda table: next(iter(sentence_table.load(write(table, tmp_path / "t.parquet")))).sentences[0]
    assert first(SAID.drop_columns("rank")) == "third it is ."
    assert first(SAID.select(["user", "text"]).take([2, 0, 1])) == "first <url> here"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": pa.array(["a b c", None])}, r"t.parquet, row 1: text is 'None'; expected a sentence"),
        ({"text": pa.array([1, 2])}, r"t.parquet, row 0: text is '1'; expected a sentence"),
        (
            {"user": pa.array(["a", ""])},
            r"t.parquet, row 1: user is ''; expected a text or whole number, who",
        ),
        (
            {"user": pa.array([1.0, float("nan")])},
            r"t.parquet, row 1: user is 'nan'; expected a text or whole",
        ),
        ({"user": pa.array([1.0, 1.5])}, r"t.parquet, row 1: user is '1.5'; expected a text or whole number"),
        ({"user": pa.array([b"a", b"b"])}, r"t.parquet, row 0: user is .*; expected a text or whole number"),
        (
            {"user": pa.array([["a"], ["b"]])},
            r"t.parquet, row 0: user is .*; expected a text or whole number",
        ),
        ({"rank": pa.array(["x", "y"])}, r"t.parquet: column 'rank' holds text"),
        ({"rank": pa.array([1, None])}, r"t.parquet: .*'rank'.*missing"),
        ({"rank": pa.array([1.0, float("nan")])}, r"t.parquet, row 1: rank is NaN; expected the place"),
    ],
)
def test_bad_cells_name_file_and_row(tmp_path, changed, message):
    columns = {"user": pa.array([1, 2]), "text": pa.array(["a b c", "d e f"]), "rank": pa.array([1, 2])}
    file = write(pa.table(columns | changed), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=message):
        list(sentence_table.load(file))


def test_ranks_of_a_text_file_keep_their_order_or_are_refused(tmp_path):
    """Beyond 2^63, and beside numbers with a point, Arrow rounds them. A file with types keeps what it has."""
    largest = 2**63 - 1
    file = tmp_path / "t.csv"
    file.write_text(f"user,text,rank\na,second one,{largest}\na,first one,{largest - 1}\n")
    assert next(iter(sentence_table.load(file))).sentences == ("first one", "second one")
    for other in (largest + 1, 0.5):
        file.write_text(f"user,text,rank\na,third one,{other}\na,second one,{largest}\n")
        row = int(other == 0.5)
        with pytest.raises(
            UserError, match=rf"t.csv, row {row}: rank is about 9.22\d+e\+18; .*Give smaller whole"
        ):
            list(sentence_table.load(file))
    decimals = [decimal.Decimal(2**70), decimal.Decimal(2**70 - 1)]
    for ranks in (pa.array([2**64 - 1, 2**64 - 2], pa.uint64()), pa.array(decimals, pa.decimal128(38, 0))):
        table = pa.table({"user": ["a", "a"], "text": ["second one", "first one"], "rank": ranks})
        file = write(table, tmp_path / "t.parquet")
        assert next(iter(sentence_table.load(file))).sentences == ("first one", "second one")


@pytest.mark.parametrize(
    ("row", "column"), [(b"b,caf\xe9 time,1", "text"), (b"\xe9,time,1", "user"), (b"b,time,\xe9", "rank")]
)
def test_text_files_that_are_not_utf8_name_the_line(tmp_path, row, column):
    file = tmp_path / "t.csv"
    file.write_bytes(b"user,text,rank\na,hello there,0\n" + row + b"\n")
    expected = (
        rf"t.csv, line 3, column '{column}': '.*\\xe9.*'; expected text in UTF-8. Save the file as UTF-8"
    )
    with pytest.raises(UserError, match=expected):
        list(sentence_table.load(file))


def test_users_may_be_whole_numbers_with_a_point(tmp_path):
    columns = {"user": pa.array([10.0, 11.0]), "text": pa.array(["a b c", "d e f"]), "rank": pa.array([1, 2])}
    file = write(pa.table(columns), tmp_path / "t.parquet")
    assert [text.client for text in sentence_table.load(file)] == ["10", "11"]


def test_other_tables_are_not_taken(tmp_path):
    file = write(SAID.select(["user", "rank"]), tmp_path / "t.parquet")
    assert sentence_table.locate(file) is None
    with pytest.raises(UserError, match="unknown column 'text'"):
        list(sentence_table.load(file))
    with pytest.raises(UserError, match=r"t.parquet has the columns user, rank, but no text: give a table"):
        find_corpus(str(file))
    with pytest.raises(UserError, match=r"holds no table of sentences.*give a table with the columns user"):
        sentence_table.load(tmp_path)
    write(SAID.slice(0, 0), file)
    with pytest.raises(UserError, match=r"t.parquet has no rows"):
        list(sentence_table.load(file))


def test_numbered_sentences_give_the_same_stores(tmp_path):
    """With any vocabulary, also one that has more words than there are."""
    rng = np.random.default_rng(0)
    said = [" ".join(f"w{k}" for k in rng.zipf(1.5, rng.integers(1, 8)) % 50) for _ in range(200)]
    users = np.repeat(np.arange(20), 10)
    corpus = sentence_table.load(write(pa.table({"user": users, "text": said}), tmp_path / "t.parquet"))
    shape: Any = {"length": 5, "max_sentences": 8, "min_sentences": 2}
    number_sentences(corpus, **shape).save(tmp_path / "numbered")
    for words, buckets in ((5, 3), (1000, 1)):
        expected = split_sentence_stores(corpus, words, buckets, **shape)
        found = with_vocabulary(open_store(tmp_path / "numbered"), words, buckets)
        for ours, theirs in zip(found, expected, strict=True):
            a, b = ours.gather(), theirs.gather()
            np.testing.assert_array_equal(a.columns["tokens"], b.columns["tokens"])
            np.testing.assert_array_equal(a.client_ids, b.client_ids)
            assert a.vocabularies["tokens"].tolist() == b.vocabularies["tokens"].tolist()


@pytest.mark.slow
def test_the_real_blogs(data_root):
    corpus = sentence_table.load(data_root / "blogs")
    texts = iter(corpus)
    sizes = [len(next(texts).sentences) for _ in range(20)]
    assert all(150 <= size <= 300 for size in sizes)
