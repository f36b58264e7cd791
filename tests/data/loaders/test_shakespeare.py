from __future__ import annotations

import gzip
import json
import lzma

import pytest

from partwise.data.loaders import shakespeare, stackoverflow
from partwise.data.text.corpus import Text
from partwise.data.text.sentences import split_sentence_stores
from partwise.types import UserError


def speech(character: str, order: int, text: str, play: str = "hamlet") -> dict:
    names = ("play", "character", "act", "scene", "order", "text")
    return dict(zip(names, (play, character, "ACT I", "SCENE I", order, text), strict=True))


SPEECHES = [
    speech("BERNARDO", 0, "Who's there?"),
    speech("FRANCISCO", 1, "Nay, answer me: stand,\nand unfold yourself."),
    speech("BERNARDO", 2, "--!"),
    speech("FRANCISCO", 3, "Bernardo? He."),
    speech("GHOST", 4, "Mark me."),
    speech("BERNARDO", 5, "Long live the king!"),
    speech("BERNARDO", 6, "He.", play="macbeth"),
]
EXPECTED = [
    Text("hamlet/BERNARDO", 0, "speech", "", ("who's there ?",), ()),
    Text("hamlet/FRANCISCO", 1, "speech", "", ("nay , answer me : stand ,", "and unfold yourself ."), ()),
    Text("hamlet/FRANCISCO", 3, "speech", "", ("bernardo ?", "he ."), ()),
    Text("hamlet/BERNARDO", 5, "speech", "", ("long live the king !",), ()),
]
COUNTS = {
    "texts": 4,
    "clients": 2,
    "speeches": 7,
    "roles": 4,
    "dropped_roles_of_few_speeches": 2,
    "dropped_no_words": 1,
}


def lines(speeches=SPEECHES) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in speeches)


@pytest.fixture
def file(tmp_path):
    folder = tmp_path / "root" / "shakespeare"
    folder.mkdir(parents=True)
    path = folder / "shakespeare_by_character.jsonl.gz"
    path.write_bytes(gzip.compress(lines()))
    return path


@pytest.fixture(scope="module")
def of_tff(tmp_path_factory, write_sqlite, write_hdf5):
    """The same roles in TFF's formats, a folder each."""
    roles = {
        "HAMLET_BERNARDO": [b"Who's there?", b"--!", b"Long live the king!"],
        "HAMLET_FRANCISCO": [b"Nay, answer me: stand,\nand unfold yourself.", b"Bernardo? He."],
        "HAMLET_GHOST": [b"Mark me."],
    }
    parts = {
        "train": {role: said[:2] if len(said) > 2 else said[:1] for role, said in roles.items()},
        "test": {role: said[2:] if len(said) > 2 else said[1:] for role, said in roles.items()},
    }
    parts["test"].pop("HAMLET_GHOST")
    root = tmp_path_factory.mktemp("tff")
    for name in ("new", "old", "packed"):
        (root / name).mkdir()
    rows = {
        split: {role: [{"snippets": text} for text in said] for role, said in part.items()}
        for split, part in parts.items()
    }
    file = write_sqlite(root / "new" / "shakespeare.sqlite", rows)
    (root / "packed" / "shakespeare.sqlite.lzma").write_bytes(lzma.compress(file.read_bytes()))
    for split, part in parts.items():
        columns = {role: {"snippets": said} for role, said in part.items()}
        write_hdf5(root / "old" / f"shakespeare_{split}.h5", columns)
    return root


def test_json_lines_packed_or_not(file, monkeypatch):
    plain = file.with_name("plain.jsonl")
    plain.write_bytes(lines().replace(b"\n", b"\n\n"))
    monkeypatch.setenv("PARTWISE_DATA", str(file.parents[1]))
    for place in (file, plain, file.parent, file.parents[1], None):
        corpus = shakespeare.load(place)
        assert list(corpus) == EXPECTED
        assert corpus.counts == COUNTS


def test_roles_of_one_speech_may_be_kept(file):
    corpus = shakespeare.load(file, min_speeches=1)
    assert {text.client for text in corpus} >= {"hamlet/GHOST", "macbeth/BERNARDO"}
    assert corpus.counts["dropped_roles_of_few_speeches"] == 0
    with pytest.raises(UserError, match="min_speeches is 0: give at least 1"):
        shakespeare.load(file, min_speeches=0)


@pytest.mark.parametrize("place", ["new", "old", "packed", "old/shakespeare_test.h5"])
def test_tff_gives_both_splits_in_order(of_tff, place):
    corpus = shakespeare.load(of_tff / place)
    texts = {(text.client, text.time): text.sentences for text in corpus}
    assert texts == {
        ("HAMLET_BERNARDO", 0): EXPECTED[0].sentences,
        ("HAMLET_BERNARDO", 2): EXPECTED[3].sentences,
        ("HAMLET_FRANCISCO", 0): EXPECTED[1].sentences,
        ("HAMLET_FRANCISCO", 1): EXPECTED[2].sentences,
    }
    left_out = {"dropped_roles_of_few_speeches": 1, "dropped_no_words": 1}
    assert corpus.counts == {"texts": 4, "clients": 2, "speeches": 6, "roles": 3, **left_out}


def test_only_a_path_of_its_own_is_taken(file, of_tff, tmp_path, monkeypatch):
    monkeypatch.setenv("PARTWISE_DATA", str(file.parent))
    assert shakespeare.locate(None) is None
    assert shakespeare.locate(file.parents[1]) is None  # may hold other sets as well
    assert shakespeare.locate(tmp_path / "stackoverflow.sqlite") is None
    assert shakespeare.locate(tmp_path / "Posts.xml") is None
    assert shakespeare.locate(str(file.parent)) == file
    assert shakespeare.locate(str(file)) == file
    for name in ("new/shakespeare.sqlite", "packed/shakespeare.sqlite.lzma", "old/shakespeare_train.h5"):
        assert shakespeare.locate((of_tff / name).parent) == of_tff / name
        assert shakespeare.locate(of_tff / name) == of_tff / name
        assert stackoverflow.locate(of_tff / name) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"play": None}, r"play is None; expected a name. Mend"),
        ({"play": " "}, r"play is ' '; expected a name"),
        ({"character": 3}, r"character is 3; expected a name"),
        ({"text": ["Mark"]}, r"text is \['Mark'\]; expected what is said"),
        ({"order": "4"}, r"order is '4'; expected a whole number from 0"),
        ({"order": True}, r"order is True; expected"),
        ({"order": -1}, r"order is -1; expected"),
        ({"order": 2**63}, r"order is 9223372036854775808; expected"),
    ],
)
def test_bad_fields_name_file_and_line(file, change, message):
    file.write_bytes(lines([*SPEECHES[:3], SPEECHES[3] | change]))
    with pytest.raises(UserError, match=rf"shakespeare_by_character.jsonl.gz, line 4: {message}"):
        list(shakespeare.load(file))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"play": "hamlet", ', r"line 8 is not JSON \(.*expected a JSON object with play, character"),
        (b"[" * 100_000, r"line 8 is not JSON"),
        (b'["hamlet"]', r"line 8 is '\[\"hamlet\"\]'; expected a JSON object"),
        (b'{"play": "haml\xe9t"}', r"line 8: byte 15, 0xe9, is not UTF-8; convert"),
        (b"{}", r"line 8: play is None"),
    ],
)
def test_bad_lines_name_file_and_line(file, line, message):
    file.write_bytes(lines() + line + b"\n")
    with pytest.raises(UserError, match=rf"shakespeare_by_character.jsonl.gz, {message}"):
        list(shakespeare.load(file))


def test_bad_files_are_named(file, of_tff, tmp_path, write_sqlite, monkeypatch):
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"jsonl.gz cannot be read .*Download it again"):
        list(shakespeare.load(file))
    with pytest.raises(UserError, match=r"gone.jsonl does not exist: give shakespeare_by_character.jsonl"):
        shakespeare.load(tmp_path / "gone.jsonl")
    (tmp_path / "new").mkdir()
    write_sqlite(tmp_path / "new" / "stackoverflow.sqlite", {"train": {"a": [{"tokens": b"x"}]}})
    with pytest.raises(UserError, match=r"new holds no .*looked for .*found stackoverflow.sqlite"):
        shakespeare.load(tmp_path / "new")
    with pytest.raises(UserError, match=r"unknown feature 'snippets'"):
        list(shakespeare.load(tmp_path / "new" / "stackoverflow.sqlite"))
    both = {"train": {"A": [{"snippets": b"fine"}]}, "test": {"A": [{"snippets": b"b\xff"}]}}
    bad = write_sqlite(tmp_path / "shakespeare.sqlite", both)
    with pytest.raises(UserError, match=r"split test, client A, snippet 0: byte 2, 0xff, is not UTF-8"):
        list(shakespeare.load(bad))
    two = {"train": {"A": [{"snippets": [b"a", b"b"]}]}, "test": {"A": [{"snippets": b"x"}]}}
    bad = write_sqlite(tmp_path / "shakespeare_two.sqlite", two)
    with pytest.raises(UserError, match=r"client A, snippet 0 is \[b'a', b'b'\]; expected one text"):
        list(shakespeare.load(bad))
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    with pytest.raises(UserError, match="no path to the speeches of Shakespeare was given"):
        shakespeare.load()


def test_the_real_plays(data_root):
    corpus = shakespeare.load(data_root).hold()
    assert list(corpus)
    assert {name: corpus.counts[name] for name in ("speeches", "roles", "dropped_roles_of_few_speeches")} == {
        "speeches": 30_995,
        "roles": 1_347,
        "dropped_roles_of_few_speeches": 1_347 - 1_119,
    }
    assert corpus.counts["clients"] == len({text.client for text in corpus}) <= 1_119
    parts = split_sentence_stores(corpus, num_words=1000, num_buckets=10)
    assert sum(part.num_clients for part in parts) == corpus.counts["clients"]
