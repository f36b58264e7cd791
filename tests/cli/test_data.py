"""Data files with mistakes, named with the line."""

from __future__ import annotations

import zipfile

import pytest

RATINGS = ["1::10::5::100", "1::11::3::101", "2::10::4::102", "2::12::1::103"]


def test_missing_and_broken_movielens_files(mistake, tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    assert "PARTWISE_DATA" in mistake("train", "movielens")
    assert "does not exist" in mistake("train", "movielens", "--data", str(tmp_path / "none"))
    wrong = tmp_path / "wrong.zip"
    wrong.write_bytes(b"not a zip")
    assert "wrong.zip" in mistake("train", "movielens", "--data", str(wrong))
    empty = tmp_path / "empty.zip"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("other/readme.txt", "hello")
    assert "readme.txt" in mistake("train", "movielens", "--data", str(empty))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("2::13::4", "line 5"),
        ("2::13::nan::5", "line 5"),
        ("2::13::four::5", "line 5"),
        ("2::13::9::5", "line 5"),
        ("2::12::2::104", "line 5"),
    ],
)
def test_bad_lines_of_ratings_dat_are_named(mistake, tmp_path, bad, says):
    file = tmp_path / "ratings.dat"
    file.write_text("\n".join([*RATINGS, bad]) + "\n")
    text = mistake("train", "movielens", "--data", str(file))
    assert "ratings.dat" in text
    assert says in text
    assert bad in text


def test_a_truncated_ratings_dat(mistake, tmp_path):
    file = tmp_path / "ratings.dat"
    file.write_text("\n".join(RATINGS) + "\n2::13::4::1")
    assert "line 5" in mistake("train", "movielens", "--data", str(file))


def test_own_tables_with_mistakes(mistake, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("user,film,rating\na,x,3\nb,y,4\n")
    assert "film" in mistake("train", "ratings", "--data", str(table))
    assert "--data" in mistake("train", "ratings")
    table.write_text("user,item,rating\na,x,3\nb,y,\n")
    assert "table.csv" in mistake("train", "ratings", "--data", str(table))
    table.write_text("user,item,rating\na,x,3\nb,y,nan\n")
    assert "table.csv" in mistake("train", "ratings", "--data", str(table))
