from __future__ import annotations

import zipfile

import pytest

from partwise.data.loaders import movielens_ratings as movielens
from partwise.data.loaders.movielens_users import AGES, GENDERS, with_users
from partwise.types import UserError

RATINGS = b"1::1193::5::978300760\n1::661::3::978302109\n3::1193::4::978298413\n"
USERS = b"1::F::1::10::48067\n2::M::56::16::70072\n3::M::25::15::55117\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ratings.dat").write_bytes(RATINGS)
    (tmp_path / "users.dat").write_bytes(USERS)
    return tmp_path


def test_every_rating_knows_its_users_gender_and_age(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("ml-1m/ratings.dat", RATINGS)
        archive.writestr("ml-1m/users.dat", USERS.replace(b"\n", b"\r\n"))
    for place in (folder, folder / "ratings.dat", tmp_path / "some.zip"):
        store = with_users(movielens.load(place), place)
        assert [GENDERS[g] for g in store.columns["gender"]] == ["F", "F", "M"]
        assert [AGES[a] for a in store.columns["age"]] == [1, 1, 25]


def test_years_are_put_into_the_same_groups(tmp_path):
    ages = (7, 17, 18, 24, 49, 55, 73)
    (tmp_path / "u.data").write_text("".join(f"{i}\t5\t3\t9\n" for i in range(len(ages))))
    lines = [f"{i}|{age}|M|writer|32067\n" for i, age in enumerate(ages)]
    (tmp_path / "u.user").write_text("".join(lines))
    store = with_users(movielens.load(tmp_path, "100k"), tmp_path, "100k")
    assert [AGES[a] for a in store.columns["age"]] == [1, 1, 18, 18, 45, 50, 56]


@pytest.mark.parametrize(
    ("users", "message"),
    [
        (b"1::F::1::10::48067\n2::M::56\n", r"users.dat, line 2: '2::M::56'; expected user::gender::age"),
        (USERS.replace(b"2::M", b"2::X"), "line 2: '2::X::56.*gender F or M"),
        (USERS.replace(b"::56::", b"::57::"), "line 2: .*age 1, 18, 25, 35, 45, 50, 56"),
        (USERS.replace(b"2::M", b"two::M"), "line 2: 'two::M"),
        (USERS.replace(b"2::M", b"1::M"), "line 2: .*one line per user, and user 1 has one already"),
        (b"2::M::56::16::70072\n", r"no line for 2 of the 2 users with ratings, the first: user 1"),
        (b"", "users.dat is empty: expected lines of user::gender"),
    ],
)
def test_bad_lines_are_named(folder, users, message):
    (folder / "users.dat").write_bytes(users)
    with pytest.raises(UserError, match=message):
        with_users(movielens.load(folder), folder)


def test_a_year_that_nobody_lives_is_refused(tmp_path):
    (tmp_path / "u.data").write_text("1\t5\t3\t9\n")
    (tmp_path / "u.user").write_text("1|0|M|writer|32067\n")
    with pytest.raises(UserError, match=r"u.user, line 1: '1.0.M.writer.32067'; expected user.age.gender"):
        with_users(movielens.load(tmp_path, "100k"), tmp_path, "100k")


def test_without_the_users_file(folder, tmp_path):
    (folder / "users.dat").unlink()
    with pytest.raises(UserError, match=r"no users.dat beside .*ratings.dat, .*or give ml-1m.zip"):
        with_users(movielens.load(folder), folder)
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("ml-1m/ratings.dat", RATINGS)
    with pytest.raises(UserError, match=r"holds no users.dat, but ml-1m/ratings.dat"):
        with_users(movielens.load(folder), tmp_path / "some.zip")


def test_the_published_users(data_root):
    store = with_users(movielens.load(data_root), data_root)
    gender = store.columns["gender"][store.starts]
    assert (gender == GENDERS.index("M")).sum() == 4331
