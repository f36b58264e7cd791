"""Gender, age and occupation of MovieLens users: `users.dat` (1m) or `u.user` (100k), beside the ratings.

Ages are the seven groups of the 1m release. The years of the 100k release are converted to the same groups.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from partwise.data.loaders.movielens_ratings import Release, bad_line, find_release, locate, unzip
from partwise.data.reading import reading
from partwise.data.store import ClientStore
from partwise.types import UserError

GENDERS = ("F", "M")
AGES = (1, 18, 25, 35, 45, 50, 56)  # a group is named by its lowest age; 1: under 18
NUM_OCCUPATIONS = 21  # numbers in the 1m release, and in the 100k release these words
OCCUPATIONS = [
    "administrator",
    "artist",
    "doctor",
    "educator",
    "engineer",
    "entertainment",
    "executive",
    "healthcare",
    "homemaker",
    "lawyer",
    "librarian",
    "marketing",
    "none",
    "other",
    "programmer",
    "retired",
    "salesman",
    "scientist",
    "student",
    "technician",
    "writer",
]


def with_users(store: ClientStore, path: str | Path | None = None, size: str = "1m") -> ClientStore:
    """A store of `movielens.load` with the columns `gender`, `age` and `occupation` (positions in GENDERS, AGES
    and the release's occupations) for every rating."""
    release = find_release(size)
    source = locate(path, release)
    with reading(source):
        text, where = read_beside(source, release, release.users_file, "gender, age and occupation")
        users = _parse(text, release, where)
    missing = [user for user in store.client_ids.tolist() if user not in users]
    if missing:
        raise UserError(
            f"{where} has no line for {len(missing)} of the {store.num_clients} users with ratings, the first: "
            f"user {missing[0]}; take both files from one release"
        )
    each = np.array([users[user] for user in store.client_ids.tolist()], np.int32).reshape(-1, 3)
    gender, age, occupation = np.repeat(each, store.counts, axis=0).T
    return store.with_columns(gender=gender, age=age, occupation=occupation)


def read_beside(source: Path, release: Release, file: str, what: str) -> tuple[bytes, str]:
    """Another file of the release, from the zip or beside the ratings file; `what` comes from it."""
    data = source.read_bytes() if source.suffix == ".zip" else source.open("rb").read(2)
    if data[:2] == b"PK":
        return unzip(source.read_bytes(), source, file, release)
    beside = source.with_name(file)
    if not beside.is_file():
        raise UserError(
            f"there is no {file} beside {source}, and {what} come from it: put it there, or "
            f"give {release.name}.zip"
        )
    return beside.read_bytes(), str(beside)


def _parse(text: bytes, release: Release, where: str) -> dict[int, tuple[int, int, int]]:
    """user -> (gender, age, occupation)."""
    if not text.strip():
        raise UserError(f"{where} is empty: expected lines of {_expected(release)}")
    users: dict[int, tuple[int, int, int]] = {}
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
        values = line.rstrip(b"\r").decode("latin-1").split(release.users_separator.decode())
        fields = dict(zip(release.users_fields, values, strict=False))
        try:
            if len(values) != len(release.users_fields):
                raise ValueError
            user, gender = int(fields["user"]), GENDERS.index(fields["gender"])
            age, occupation = _group(int(fields["age"]), release), _occupation(fields["occupation"], release)
        except ValueError:
            raise bad_line(where, number, line, _expected(release)) from None
        if user in users:
            raise bad_line(where, number, line, f"one line per user, and user {user} has one already")
        users[user] = (gender, age, occupation)
    return users


def _group(age: int, release: Release) -> int:
    """The group of an age. The 1m release gives groups, the 100k release years."""
    if release.name == "ml-1m":
        return AGES.index(age)
    if not 0 < age < 130:
        raise ValueError
    return int(np.searchsorted(AGES, age, side="right")) - 1


def _occupation(told: str, release: Release) -> int:
    """The number of an occupation."""
    if release.name != "ml-1m":
        return OCCUPATIONS.index(told)
    if not 0 <= int(told) < NUM_OCCUPATIONS:
        raise ValueError
    return int(told)


def _expected(release: Release) -> str:
    ages = ", ".join(map(str, AGES)) if release.name == "ml-1m" else "a whole number of years"
    names = release.users_separator.decode().join(release.users_fields)
    works = (
        f"a number below {NUM_OCCUPATIONS}" if release.name == "ml-1m" else f"one of {', '.join(OCCUPATIONS)}"
    )
    return f"{names}, gender F or M, age {ages}, occupation {works}"
