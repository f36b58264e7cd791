"""Places for immutable files: a folder, and a bucket of a real S3 server."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import urllib3
from pyarrow import fs

from partwise.deployment import files
from partwise.deployment.files import check_name, fits, name_of, open_place
from partwise.types import UserError

POOL = urllib3.PoolManager(timeout=120)


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    if request.param == "folder":
        return open_place(tmp_path / "deep" / "files")
    bucket = f"b{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]}"
    return open_place(request.getfixturevalue("s3")(bucket))


def test_a_name_is_the_digest_of_the_bytes():
    name = name_of(b"abc", "json")
    assert name == "ba7816bf8f01cfea414140de5dae2223.json"
    assert fits(name, b"abc")
    assert not fits(name, b"abd")


def test_what_was_put_is_there(place):
    assert place.names() == set()
    name = place.put(b"abc", "json")
    assert name == name_of(b"abc", "json")
    assert place.put(b"abc", "json") == name
    more = [b"%d" % number for number in range(60)]
    names = place.put_many(iter(more), "index")
    assert names == [name_of(data, "index") for data in more]
    assert place.put_many([], "index") == []
    assert place.names() == {name, *names}
    assert [place.read(each) for each in (name, *names)] == [b"abc", *more]


def test_files_are_deleted(place):
    names = place.put_many([b"a", b"b", b"c"], "safetensors")
    place.delete([names[0], names[2], name_of(b"never there", "json")])
    place.delete([])
    assert place.names() == {names[1]}
    with pytest.raises(UserError, match="no such file"):
        place.read(names[0])


def test_several_batches_and_the_same_file_twice(place, monkeypatch):
    monkeypatch.setattr(files, "BATCH", 4)
    data = [b"%d" % (number % 7) for number in range(14)]
    assert place.put_many(data, "index") == [name_of(each, "index") for each in data]
    assert len(place.names()) == 7


@pytest.mark.parametrize("name", ["../secret.json", "x.json", "A" * 32 + ".json", "a" * 32 + ".exe", 3, None])
def test_nothing_else_is_a_name(place, name):
    with pytest.raises(UserError, match="no name of a file"):
        check_name(name)
    for call in (place.read, lambda name: place.delete([name])):
        with pytest.raises(UserError, match="no name of a file"):
            call(name)


def test_a_file_that_is_there_is_not_written_again(tmp_path):
    place = open_place(tmp_path)
    name = place.put(b"abc", "json")
    os.utime(tmp_path / name, (1, 1))
    place.put_many([b"abc", b"abd"], "json")
    assert (tmp_path / name).stat().st_mtime == 1
    (tmp_path / name).write_bytes(b"")  # as after a loss of power
    place.put(b"abc", "json")
    assert place.read(name) == b"abc"


def test_a_damaged_file_is_not_read(tmp_path):
    place = open_place(tmp_path)
    name = place.put(b"abc", "json")
    (tmp_path / name).write_bytes(b"abd")
    with pytest.raises(UserError, match="is damaged"):
        place.read(name)


def test_a_full_disk(tmp_path, monkeypatch):
    place = open_place(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=rf"{tmp_path}.*No space left on device.*Make room"):
            place.put_many([b"a", b"b"], "json")
    assert os.listdir(tmp_path) == []
    assert place.put(b"a", "json") == name_of(b"a", "json")


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        open_place(tmp_path / "file" / "folder")
    with pytest.raises(UserError, match="to a folder or to s3://"):
        open_place("ftp://example.org/files")


def test_a_bucket_that_is_not_there(s3):
    there = s3("there-it-is")
    with pytest.raises(UserError, match=r"no bucket 'there-it-is-not'\. Make the bucket first"):
        open_place(there.replace("there-it-is", "there-it-is-not"))
    with pytest.raises(UserError, match=r"no address of a bucket: .*nonsense"):
        open_place(f"{there}&nonsense=1")


def test_a_bucket_that_goes_away(s3, s3_server):
    place = open_place(s3("short-lived"))
    assert POOL.request("DELETE", f"http://{s3_server}/short-lived").status == 204
    with pytest.raises(UserError, match=r"s3://short-lived/models/one.*Make the bucket first"):
        place.put(b"abc", "json")


def test_keys_that_open_nothing(s3, s3_server):
    there = s3("locked")
    reset = f"http://{s3_server}/moto-api/reset-auth"
    try:
        assert POOL.request("POST", reset, body=b"0").status == 200
        with pytest.raises(UserError, match=r"s3://locked.*AWS_ACCESS_KEY_ID"):
            open_place(there)
    finally:
        POOL.request("POST", reset, body=b"inf")


def test_files_in_a_bucket_may_be_kept_for_ever(s3):
    url = s3("for-ever")
    name = open_place(url).put(b"abc", "json")
    system, prefix = fs.FileSystem.from_uri(url)
    with system.open_input_stream(f"{prefix}/{name}") as file:
        assert b"immutable" in file.metadata()["Cache-Control"]


def test_a_folder_needs_no_file_systems_of_pyarrow():
    assert "\nimport pyarrow" not in Path(files.__file__).read_text()
