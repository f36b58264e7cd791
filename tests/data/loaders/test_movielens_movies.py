from __future__ import annotations

import zipfile

import pytest

from partwise.data.loaders import movielens_ratings as movielens
from partwise.data.loaders.movielens_movies import GENRES, NOTHING, NUM_FEATURES, movie_features
from partwise.types import UserError

RATINGS = b"1::1193::5::978300760\n1::661::3::978302109\n3::1193::4::978298413\n"
MOVIES = b"661::Some Peach (1996)::Animation|Musical\n1193::A Nest (1975)::Drama\n2::Unrated (2000)::War\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ratings.dat").write_bytes(RATINGS)
    (tmp_path / "movies.dat").write_bytes(MOVIES)
    return tmp_path


def words(row):
    return [GENRES[feature] for feature in row if NOTHING < feature < len(GENRES)]


def test_every_item_knows_its_genres_and_its_period(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("ml-1m/ratings.dat", RATINGS)
        archive.writestr("ml-1m/movies.dat", MOVIES.replace(b"\n", b"\r\n"))
    for place in (folder, tmp_path / "some.zip"):
        store = movielens.load(place)
        found = dict(zip(store.vocabularies["item"].tolist(), movie_features(store, place), strict=True))
        assert {item: words(row) for item, row in found.items()} == {
            661: ["Animation", "Musical"],
            1193: ["Drama"],
        }
        periods = {item: max(row) for item, row in found.items()}
        assert len(GENRES) < periods[1193] < periods[661] < NUM_FEATURES


def test_flags_of_the_smaller_release(tmp_path):
    flags = lambda *names: "|".join("1" if genre in names else "0" for genre in GENRES)
    (tmp_path / "u.data").write_text("1\t5\t3\t9\n1\t6\t3\t9\n")
    lines = [f"5|A (1995)|01-Jan-1995||x|{flags('War')}\n", f"6|unknown||||{flags('unknown')}\n"]
    (tmp_path / "u.item").write_text("".join(lines))
    first, second = movie_features(movielens.load(tmp_path, "100k"), tmp_path, "100k")
    assert (words(first), words(second)) == (["War"], ["unknown"])
    assert max(first) >= len(GENRES) > max(second)  # the second has no date


@pytest.mark.parametrize(
    ("movies", "message"),
    [
        (MOVIES.replace(b"Drama", b"Dream"), r"movies.dat, line 2: .*expected movie::title \(year\)::genres"),
        (MOVIES.replace(b"1193::A", b"1193"), "line 2: "),
        (
            MOVIES.replace(b"661::", b"662::"),
            "no line for 1 of the 2 movies with ratings, the first: movie 661",
        ),
    ],
)
def test_bad_lines_are_named(folder, movies, message):
    (folder / "movies.dat").write_bytes(movies)
    with pytest.raises(UserError, match=message):
        movie_features(movielens.load(folder), folder)
