"""Lines of users and items, in files, folders and zips; and what is wrong with others."""

from __future__ import annotations

import zipfile

import pytest

from partwise.data.loaders import check_ins, listening_counts, sequences
from partwise.types import UserError

TEXT = "7 30 10 20\n3 10 10\n"


def test_lines_of_users_and_items_keep_their_order(tmp_path):
    (tmp_path / "Toys.txt").write_text(TEXT)
    with zipfile.ZipFile(tmp_path / "all_sequences.zip", "w") as archive:
        archive.writestr("data/Games.txt", TEXT)
    for store in (
        sequences.load(tmp_path / "Toys.txt", "Toys"),
        sequences.load(tmp_path, "Toys"),
        sequences.load(tmp_path / "all_sequences.zip", "Games"),
        sequences.load(tmp_path, "Games"),
    ):
        ids = store.vocabularies["item"]
        assert ids.tolist() == [10, 20, 30]
        first = store.examples(store.find(7))["item"]
        assert ids[first].tolist() == [30, 10, 20]
        assert ids[store.examples(store.find(3))["item"]].tolist() == [10, 10]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("1 2\n3\n", "line 2: '3'; expected whole numbers"),
        ("1 2\n3 x\n", "line 2: '3 x'"),
        ("1 2\n3 -4\n", "line 2"),
        ("1 2\n3 99999999999\n", "line 2"),
        ("1 2\n1 3\n", "user 1 has two lines"),
        ("5 10 20\n7 20 40\n1 5 6\n1 6 7\n", "user 1 has two lines"),
    ],
)
def test_wrong_lines_are_named(tmp_path, text, told):
    (tmp_path / "Toys.txt").write_text(text)
    with pytest.raises(UserError, match=told):
        sequences.load(tmp_path / "Toys.txt", "Toys")


def test_a_folder_without_the_file_says_what_it_holds(tmp_path):
    (tmp_path / "other.csv").write_text("x")
    with pytest.raises(UserError, match=r"holds no Toys.txt.*found other.csv"):
        sequences.load(tmp_path, "Toys")


def test_check_ins_in_both_formats_are_the_same_events(tmp_path):
    (tmp_path / "a.csv").write_text("user,poi,minute\n1,5,30\n1,6,10\n2,5,20\n")
    times = {10: "Tue Apr 03 18:00:10 +0000 2012", 20: "Tue Apr 03 18:00:20 +0000 2012"}
    times[30] = "Tue Apr 03 18:00:30 +0000 2012"
    line = lambda user, place, time: f"{user}\t{place}\tc\tBar\t1.0\t2.0\t-240\t{times[time]}\n"
    (tmp_path / "dataset_TSMC2014_NYC.txt").write_text(line(1, 5, 30) + line(1, 6, 10) + line(2, 5, 20))
    table, original = check_ins.load(tmp_path / "a.csv"), check_ins.load(tmp_path)
    for store in (table, original):
        ids = store.vocabularies["item"]
        assert [str(each) for each in ids[store.examples(store.find(1))["item"]]] == ["6", "5"]
    (tmp_path / "dataset_TSMC2014_NYC.txt").write_text(line(1, 5, 30).replace("Tue Apr", "nonsense"))
    with pytest.raises(UserError, match="expected lines of user, venue"):
        check_ins.load(tmp_path)


def test_listening_counts(tmp_path):
    file = tmp_path / "user_artists.dat"
    file.write_text("userID\tartistID\tweight\n2\t51\t13883\n2\t52\t11690\n4\t51\t1\n")
    store = listening_counts.load(tmp_path)
    assert store.num_clients == 2
    assert store.vocabularies["item"].tolist() == [51, 52]
    assert store.examples(store.find(2))["count"].tolist() == [13883, 11690]
    file.write_text("user\tartist\n1\t2\n")
    with pytest.raises(UserError, match="userID, artistID, weight is missing"):
        listening_counts.load(file)
    file.write_text("userID\tartistID\tweight\n2\tx\t3\n")
    with pytest.raises(UserError, match="expected lines of userID"):
        listening_counts.load(file)
