"""The files that a device keeps: bounded, checked, shared by processes, and never in the way."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys

from partwise.deployment.file_cache import FileCache
from partwise.deployment.files import FolderPlace, name_of

FILES = {name_of(b"%d" % number * 100, "index"): b"%d" % number * 100 for number in range(10)}
NAMES = list(FILES)


def age(cache, name, seconds):
    os.utime(cache.folder / name, (1_000_000 - seconds, 1_000_000 - seconds))


def test_what_was_put_is_found(tmp_path):
    cache = FileCache(tmp_path / "deep" / "cache")
    assert cache.get_many(NAMES) == {}
    cache.put_many(FILES)
    assert cache.get_many([*NAMES, name_of(b"", "json")]) == FILES
    assert FileCache(tmp_path / "deep" / "cache").get_many(NAMES[:1]) == {NAMES[0]: FILES[NAMES[0]]}


def test_only_its_user_may_look(tmp_path):
    cache = FileCache(tmp_path / "cache")
    cache.put_many(FILES)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert (cache.folder / NAMES[0]).stat().st_mode & 0o777 == 0o600


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    cache = FileCache(tmp_path, most=500)
    cache.put_many({name: FILES[name] for name in NAMES[:5]})
    for place, name in enumerate(NAMES[:5]):
        age(cache, name, 100 - place)
    assert NAMES[0] in cache.get_many(NAMES[:1])  # used now
    cache.put_many({name: FILES[name] for name in NAMES[5:7]})
    assert set(cache.get_many(NAMES)) == {NAMES[0], *NAMES[3:7]}


def test_what_is_too_large_is_not_kept(tmp_path):
    cache = FileCache(tmp_path, most=150)
    large = b"x" * 200
    cache.put_many({NAMES[0]: FILES[NAMES[0]], name_of(large, "json"): large})
    assert os.listdir(tmp_path) == NAMES[:1]


def test_a_damaged_file_is_dropped(tmp_path, caplog):
    cache = FileCache(tmp_path)
    cache.put_many(FILES)
    (tmp_path / NAMES[0]).write_bytes(b"1" * 100)
    (tmp_path / NAMES[1]).write_bytes(b"")
    with caplog.at_level(logging.WARNING, "partwise"):
        assert set(cache.get_many(NAMES)) == set(NAMES[2:])
    assert len(caplog.records) == 2
    assert not (tmp_path / NAMES[0]).exists()


def test_a_full_disk_is_said_once(tmp_path, monkeypatch, caplog):
    cache = FileCache(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING, "partwise"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            cache.put_many(FILES)
            cache.put_many(FILES)
        assert [each.getMessage() for each in caplog.records] == [
            f"the cache '{tmp_path}' cannot be written ([Errno 28] No space left on device): going on without it"
        ]
        assert os.listdir(tmp_path) == []
        cache.put_many(FILES)
    assert cache.get_many(NAMES) == FILES
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = FileCache(tmp_path / "file")
    cache.put_many(FILES)
    assert cache.get_many(NAMES) == {}
    assert "going on without it" in caplog.text


def test_what_a_killed_process_left_behind(tmp_path):
    old, young, other = (tmp_path / name for name in (".a.1.2.tmp", ".b.1.2.tmp", "mine.txt"))
    for path in (old, young, other):
        path.write_text("x")
        os.utime(path, (1, 1))
    os.utime(young)
    FileCache(tmp_path).put_many(FILES)
    FolderPlace(tmp_path)
    assert not old.exists()
    assert young.exists()
    assert other.exists()


WORK = """
import sys
from partwise.deployment.file_cache import FileCache
from partwise.deployment.files import FolderPlace, name_of
cache = FileCache(sys.argv[1], most=2_000)
for turn in range(150):
    files = {name_of(data, "index"): data for data in (b"%d" % (turn * 7 % 50 + i) * 100 for i in range(4))}
    found = cache.get_many(files)
    assert all(files[name] == data for name, data in found.items())
    cache.put_many(files)
"""


def test_two_processes(tmp_path):
    command = [sys.executable, "-W", "error", "-c", WORK, str(tmp_path)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert not any(b"going on without" in each for each in errors)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2_000
    assert not list(tmp_path.glob(".*"))
