from __future__ import annotations

import gzip
import zipfile

import pytest

from partwise.data.loaders import sentiment140
from partwise.data.text.corpus import Text
from partwise.types import UserError

ROW = '"{}","1467810369","Mon Apr 06 22:19:45 {} 2009","NO_QUERY","{}","{}"\r\n'
ROWS = [
    ROW.format(0, "PDT", "ann", "@bob Can't   STOP... it's a caf\u00e9, OK?"),
    ROW.format(4, "UTC", "bob", 'a ""quote"", and\nanother line'),
    ROW.format(4, "PDT", "ann", "$$$"),
]
TIME = 1_239_056_385_000  # 2009-04-06 22:19:45 UTC
LATER = TIME + 7 * 3_600_000  # the same in California
EXPECTED = [
    Text(
        "ann",
        TIME + 7 * 3_600_000,
        "tweet",
        "",
        ("bob can't stop . . . it's a caf\u00e9 , ok ?",),
        ("negative",),
    ),
    Text("bob", TIME, "tweet", "", ("a quote , and another line",), ("positive",)),
    Text("ann", LATER, "tweet", "", (), ("positive",)),
]


def write(folder, rows, name="training.csv"):
    (folder / name).write_bytes("".join(rows).encode("latin-1"))
    return folder / name


def test_the_file_as_it_is_distributed(tmp_path):
    plain = write(tmp_path, ROWS)
    packed = tmp_path / "training.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    archive = tmp_path / "trainingandtestdata.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("testdata.manual.2009.06.14.csv", ROW.format(2, "UTC", "x", "neutral"))
        files.writestr("training.1600000.processed.noemoticon.csv", plain.read_bytes())
    for file in (plain, packed, archive):
        corpus = sentiment140.load(file)
        assert list(corpus) == EXPECTED
        assert corpus.counts == {"texts": 3, "clients": 2, "without_token": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('"0","1","now"\n', r"line 5: 3 fields; expected 6 quoted fields: polarity, id"),
        (ROW.format(2, "PDT", "u", "t"), r"line 5: polarity is '2'; expected 0 \(negative\) or 4"),
        (ROW.format(4, "CET", "u", "t"), r"line 5: date 'Mon Apr 06 22:19:45 CET 2009'; expected one like"),
        (ROW.format(4, "PDT", "u", "t").replace("06", "31"), r"line 5: date .*31 22.*mend the row"),
        (ROW.format(4, "PDT", "", "t"), r"line 5 has no user"),
        ('"0","1' + "x" * 140_000, r"line 5: field larger than field limit .*Is a quote left open"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    file = write(tmp_path, [*ROWS, row])  # a row has a line end in it, so the fourth is on line 5
    with pytest.raises(UserError, match=message):
        list(sentiment140.load(file))


def test_bad_archives_are_named(tmp_path):
    whole = gzip.compress("".join(ROWS * 50).encode("latin-1"))
    (tmp_path / "cut.csv.gz").write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"cut.csv.gz cannot be read .*Download it again"):
        list(sentiment140.load(tmp_path / "cut.csv.gz"))
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as files:
        files.writestr("readme.txt", "nothing")
    with pytest.raises(UserError, match=r"other.zip holds readme.txt: give a zip with one .csv file"):
        list(sentiment140.load(tmp_path / "other.zip"))
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"bad.zip cannot be read"):
        list(sentiment140.load(tmp_path / "bad.zip"))


def test_the_real_sample(data_root):
    corpus = sentiment140.load(data_root / "sentiment140-sample" / "sentiment140_20k.csv.gz")
    labels = [text.tags[0] for text in corpus]
    assert labels.count("negative") == 9999  # data/README.md
    assert corpus.counts["texts"] == 20_000
    assert corpus.counts["clients"] == 18_105
