"""Genres and years of MovieLens movies: `movies.dat` (1m) or `u.item` (100k), beside the ratings."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from partwise.data.loaders.movielens_ratings import Release, bad_line, find_release, locate
from partwise.data.loaders.movielens_users import read_beside
from partwise.data.reading import reading
from partwise.data.store import ClientStore
from partwise.types import UserError

# In the order of the flags of the 100k release.
GENRES = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]
PERIODS = (1930, 1940, 1950, 1960, 1970, 1975, 1980, 1985, 1990, 1993, 1995, 1996, 1997, 1998, 1999, 2000)
NUM_FEATURES = len(GENRES) + len(PERIODS) + 1
MOST_GENRES = 6  # of a movie, in both releases
NOTHING = -1


def movie_features(store: ClientStore, path: str | Path | None = None, size: str = "1m") -> np.ndarray:
    """The features of every item of a store of `movielens.load`: [items, 7], the positions of its genres in
    GENRES, and len(GENRES) + the number of its period. NOTHING fills rows of fewer."""
    release = find_release(size)
    source = locate(path, release)
    with reading(source):
        text, where = read_beside(source, release, release.movies_file, "genres and years")
        movies = _parse(text, release, where)
    items = store.vocabularies["item"].tolist()
    missing = [item for item in items if item not in movies]
    if missing:
        raise UserError(
            f"{where} has no line for {len(missing)} of the {len(items)} movies with ratings, the first: movie "
            f"{missing[0]}; take both files from one release"
        )
    found = np.full((len(items), MOST_GENRES + 1), NOTHING, np.int32)
    for row, item in zip(found, items, strict=True):
        row[: len(movies[item])] = movies[item]
    return found


def _parse(text: bytes, release: Release, where: str) -> dict[int, list[int]]:
    """movie -> features."""
    movies: dict[int, list[int]] = {}
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
        fields = line.rstrip(b"\r").decode("latin-1").split(release.movies_separator.decode())
        try:
            genres, year = (_of_words if release.name == "ml-1m" else _of_flags)(fields)
            if len(genres) > MOST_GENRES:
                raise ValueError
            movies[int(fields[0])] = [*genres, *_period(year)]
        except (ValueError, IndexError):
            raise bad_line(where, number, line, _expected(release)) from None
    return movies


def _of_words(fields: list[str]) -> tuple[list[int], str]:
    """Genres and year of `movie::title (year)::genre|genre`."""
    _, title, genres = fields
    year = re.search(r"\((\d{4})\)$", title.strip())
    return [GENRES.index(genre) for genre in genres.split("|")], year.group(1) if year else ""


def _of_flags(fields: list[str]) -> tuple[list[int], str]:
    """Genres and year of `movie|title|day-month-year|...|...|flag|flag ...`."""
    flags = fields[5:]
    if len(flags) != len(GENRES) or set(flags) - {"0", "1"}:
        raise ValueError
    return [place for place, flag in enumerate(flags) if flag == "1"], fields[2][-4:]


def _period(year: str) -> list[int]:
    """The feature of a year, if there is one."""
    return [len(GENRES) + int(np.searchsorted(PERIODS, int(year), side="right"))] if year else []


def _expected(release: Release) -> str:
    if release.name == "ml-1m":
        return (
            f"movie::title (year)::genres with | between them, at most {MOST_GENRES} of {', '.join(GENRES)}"
        )
    return f"movie|title|date|date|address and {len(GENRES)} flags 0 or 1, at most {MOST_GENRES} of them 1"
