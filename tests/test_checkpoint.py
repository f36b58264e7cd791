from __future__ import annotations

import errno
import json
import os
import resource
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise import checkpoint
from partwise.types import UserError

ARRAYS = {
    "scalar": np.float32(1.5).reshape(()),
    "count": np.array(7, np.int32),
    "table/rows": np.arange(6, dtype=np.float32).reshape(2, 3),
    "empty": np.zeros((0, 4), np.float32),
    "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
}
HEADER = {"round": 12, "nested": {"name": "a b"}, "list": [1, 2.5, None]}


class Slots(NamedTuple):
    count: object
    moments: dict


DTYPES = ["bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16", "uint16"]
DTYPES += ["int32", "uint32", "int64", "uint64", "bool"]
ODD_NAMES = ['"', "\\", "\n\x01\x7f", "ü/é\u2028", "z", "Z", "é", "\U0001f600"]
OF_EVERY_TYPE = {f"{d} x": np.arange(6).reshape(2, 3).astype(jnp.dtype(d)) for d in DTYPES}


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_bytes_round_trip_keeps_names_shapes_types_and_header():
    arrays, header = checkpoint.from_bytes(checkpoint.to_bytes(ARRAYS, HEADER))
    assert header == HEADER
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)


def test_bytes_without_header_and_without_arrays():
    assert checkpoint.from_bytes(checkpoint.to_bytes({})) == ({}, {})


def test_jax_arrays_round_trip():
    arrays, _ = checkpoint.from_bytes(checkpoint.to_bytes({"x": jnp.moveaxis(jnp.ones((2, 3)), 1, 0)}))
    assert arrays["x"].shape == (3, 2)


def test_file_round_trip_and_missing_folder_is_made(tmp_path):
    path = tmp_path / "deep" / "er" / "model.safetensors"
    checkpoint.save_arrays(path, ARRAYS, HEADER)
    arrays, header = checkpoint.load_arrays(path)
    assert header == HEADER
    np.testing.assert_array_equal(arrays["turned"], ARRAYS["turned"])
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("keep", [0, 4, 8, 50, -1])
def test_truncated_file_is_refused_by_name(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint.to_bytes(ARRAYS, HEADER)[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors' is damaged or foreign"):
        checkpoint.load_arrays(path)


@pytest.mark.parametrize(
    "foreign",
    [b"PK\x03\x04 a zip archive, for once", b"\x02\0\0\0\0\0\0\0[]", b"\x04\0\0\0\0\0\0\0null", b"\xff" * 64],
    ids=["zip", "json list", "json null", "ones"],
)
def test_foreign_file_is_refused_by_name(tmp_path, foreign):
    path = tmp_path / "other.bin"
    path.write_bytes(foreign)
    with pytest.raises(UserError, match=r"other\.bin' is damaged or foreign"):
        checkpoint.load_arrays(path)


@given(st.binary(max_size=80))
def test_no_bytes_raise_anything_but_a_user_error(data):
    with pytest.raises(UserError, match=f"these {len(data)} bytes"):
        checkpoint.from_bytes(data)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"could not read '.*gone\.safetensors': No such file"):
        checkpoint.load_arrays(tmp_path / "gone.safetensors")


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_full_disk_leaves_the_previous_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "model.safetensors"
    checkpoint.save_arrays(path, ARRAYS, HEADER)
    before = path.read_bytes()

    def write(file):
        file.write(b"half of it")
        if failing == "write":
            full_disk()

    if failing != "write":
        monkeypatch.setattr(os, failing, full_disk)
    with pytest.raises(UserError, match=r"could not write '.*model\.safetensors': No space left on device"):
        checkpoint.write_atomically(path, write)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_any_other_failure_leaves_the_previous_file_too(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.write_file(path, b"before")

    def write(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_atomically(path, write)
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_threads_that_write_one_file_at_a_time_both_succeed(tmp_path):
    """A server's own thread and whoever calls it may end a run at the same moment."""
    both = threading.Barrier(2, timeout=60)

    def write(text):
        def fill(file):
            both.wait()
            file.write(text)
            both.wait()

        checkpoint.write_atomically(tmp_path / "file", fill)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (b"one", b"other")))
    assert (tmp_path / "file").read_bytes() in (b"one", b"other")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folder_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="could not write"):
        checkpoint.write_file(tmp_path / "file" / "model.safetensors", b"data")


def test_tree_round_trip_keeps_structure_and_scalars(tmp_path):
    tree = Slots(jnp.asarray(3, jnp.int32), {"b": jnp.ones((2, 2)), "a": jnp.zeros(())})
    checkpoint.save_tree(tmp_path / "state", tree, {"round": 4})
    loaded, header = checkpoint.load_tree(tmp_path / "state", like=tree)
    assert header == {"round": 4}
    assert isinstance(loaded, Slots)
    assert loaded.count.dtype == np.int32
    assert loaded.count.shape == ()
    np.testing.assert_array_equal(loaded.moments["b"], np.ones((2, 2)))


@pytest.mark.parametrize(
    "like",
    [
        {"a": jnp.zeros(4), "b": jnp.zeros(())},
        {"a": jnp.zeros(3)},
        {"a": jnp.zeros(3), "b": jnp.zeros(()), "c": 0.0},
    ],
    ids=["shape", "fewer", "more"],
)
def test_tree_of_another_run_is_refused(tmp_path, like):
    checkpoint.save_tree(tmp_path / "state", {"a": jnp.zeros(3), "b": jnp.zeros(())}, {})
    with pytest.raises(UserError, match="state' was written by a run with other parameters"):
        checkpoint.load_tree(tmp_path / "state", like)


def test_every_flipped_bit_of_a_file_is_refused_or_harmless(tmp_path):
    """Of names, types, shapes, header and values; only what says the same may pass."""
    path = tmp_path / "model.safetensors"
    checkpoint.save_arrays(path, ARRAYS, HEADER)
    data, passed = path.read_bytes(), 0
    for bit in range(0, 8 * len(data), 3):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        try:
            arrays, header = checkpoint.load_arrays(path)
        except UserError as error:
            assert "is damaged or foreign" in str(error)  # noqa: PT017
            continue
        passed += 1
        assert header == HEADER
        assert arrays.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert arrays[name].tobytes() == array.tobytes()
            assert (arrays[name].shape, arrays[name].dtype) == (array.shape, array.dtype)
    assert passed <= 8 * data[8:].count(b" ")  # spaces between what is said


def test_a_file_without_a_digest_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint.to_bytes(ARRAYS, HEADER))
    with pytest.raises(UserError, match="carries no digest"):
        checkpoint.load_arrays(path)
    (tmp_path / "a.json").write_text('{"lanes": 3}')
    with pytest.raises(UserError, match=r"a\.json' is damaged or foreign: it carries no digest"):
        checkpoint.load_json(tmp_path / "a.json")
    (tmp_path / "a.toml").write_text("rounds = 3\n")
    with pytest.raises(UserError, match=r"a\.toml' is damaged or foreign: it carries no digest"):
        checkpoint.load_text(tmp_path / "a.toml")


@pytest.mark.parametrize(
    "text", [b"[]", b"NaN", b'"a"', b"\xff\xfe{}", b"{", b"", b'{"#sha256": 3}', b"[" * 100_000]
)
def test_json_of_another_kind_is_refused_by_name(tmp_path, text):
    path = tmp_path / "start.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match=r"start\.json' is damaged or foreign"):
        checkpoint.load_json(path)


def test_sealed_json_and_text_round_trip_and_notice_a_change(tmp_path):
    document = {"a": [1, 2.5, None], "ü": {"b": "c"}, "big": 2**60}
    checkpoint.save_json(tmp_path / "a.json", document)
    assert checkpoint.load_json(tmp_path / "a.json") == document
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("2.5", "2.6"))
    with pytest.raises(UserError, match="does not fit its digest"):
        checkpoint.load_json(tmp_path / "a.json")
    checkpoint.save_text(tmp_path / "a.toml", 'a = "ü"\n')
    assert checkpoint.load_text(tmp_path / "a.toml") == 'a = "ü"\n'
    (tmp_path / "a.toml").write_text((tmp_path / "a.toml").read_text().replace("ü", "u"))
    with pytest.raises(UserError, match="does not fit its digest"):
        checkpoint.load_text(tmp_path / "a.toml")


def test_the_same_arrays_give_the_same_bytes(tmp_path):
    """In another process too, where sets and maps have another order: runs are compared by their files."""
    code = """
import sys, numpy as np
from pathlib import Path
from partwise.checkpoint import save_arrays
save_arrays(Path(sys.argv[1]), {n: np.arange(3) for n in "abcdefgh"}, {"round": 1, "task": "a", "kind": "b"})
"""
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_messages_carry_no_digest():
    """They are many and small, and their transport has checksums of its own."""
    assert checkpoint.SEAL.encode() not in checkpoint.to_bytes(ARRAYS, HEADER)


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    for name in (".model.json.4711.tmp", ".notes.tmp", "a.1.tmp"):
        (tmp_path / name).write_text("")
    checkpoint.remove_temporary_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.tmp", "a.1.tmp"]


@pytest.mark.parametrize("name", OF_EVERY_TYPE)
def test_every_type_of_number_comes_back(name):
    array = OF_EVERY_TYPE[name]
    (back,) = checkpoint.from_bytes(checkpoint.to_bytes({"x": array}))[0].values()
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        ARRAYS,
        OF_EVERY_TYPE,
        {name: np.arange(i) for i, name in enumerate(ODD_NAMES)},
        {"turned": np.arange(6, dtype=">f4").reshape(2, 3).T, "strided": np.arange(9)[::2]},
        {"jax": jnp.ones((2, 3), jnp.bfloat16)},
    ],
    ids=["none", "some", "types", "names", "orders", "jax"],
)
def test_a_file_is_byte_for_byte_what_the_library_writes(tmp_path, arrays):
    checkpoint.save_arrays(tmp_path / "a", arrays, HEADER)
    loaded, header = checkpoint.load_arrays(tmp_path / "a")
    assert header == HEADER
    sealed = HEADER | {checkpoint.SEAL: checkpoint.digest_of(loaded, header)}
    assert (tmp_path / "a").read_bytes() == checkpoint.to_bytes(arrays, sealed)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype.newbyteorder("=")
        assert loaded[name].flags.writeable
        np.testing.assert_array_equal(loaded[name], array)


def test_a_type_that_no_file_can_hold_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'x' has the type complex64; a file can hold uint64, .*bool"):
        checkpoint.save_arrays(tmp_path / "a", {"x": np.ones(2, np.complex64)})
    assert not list(tmp_path.iterdir())


def test_a_file_that_the_disk_has_no_room_for_leaves_the_previous_one(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.save_arrays(path, ARRAYS, HEADER)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(UserError, match=r"could not write '.*model\.safetensors': File too large"):
            checkpoint.save_arrays(path, {"x": np.ones(1 << 16)}, HEADER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_who_may_read_a_file_is_so_from_its_first_byte_on(tmp_path, monkeypatch):
    seen, of = [], lambda: [stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()]
    raw, replace, before = checkpoint._raw, os.replace, os.umask(0)
    monkeypatch.setattr(checkpoint, "_raw", lambda array: seen.extend(of()) or raw(array))
    monkeypatch.setattr(os, "replace", lambda *names: seen.extend(of()) or replace(*names))
    try:
        checkpoint.save_arrays(tmp_path / "a", {"x": np.ones(3)}, mode=0o600)
    finally:
        os.umask(before)
    assert seen == [0o600, 0o600]
    assert of() == [0o600]


def write_header(path, told: object, size: int) -> None:
    text = json.dumps(told).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)


def test_a_header_is_read_without_the_arrays(tmp_path):
    """Even of a file that no memory could hold."""
    entry = {"dtype": "F32", "shape": [1 << 36], "data_offsets": [0, 1 << 38]}
    about = {"partwise": json.dumps({"round": 3, checkpoint.SEAL: "0"})}
    write_header(tmp_path / "a", {"x": entry, "__metadata__": about}, 1 << 38)
    assert checkpoint.read_header(tmp_path / "a") == {"round": 3}


def test_a_header_does_not_vouch_for_the_arrays(tmp_path):
    checkpoint.save_arrays(tmp_path / "a", ARRAYS, HEADER)
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert checkpoint.read_header(tmp_path / "a") == HEADER
    with pytest.raises(UserError, match="does not fit its digest"):
        checkpoint.load_arrays(tmp_path / "a")


PLACE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "told",
    [
        [],
        None,
        {"x": 3},
        {"x": {}},
        {"x": PLACE | {"dtype": "F8"}},
        {"x": PLACE | {"shape": [3]}},
        {"x": PLACE | {"shape": [-1, -2]}},
        {"x": PLACE | {"shape": [2.0]}},
        {"x": PLACE | {"data_offsets": [0, 8.0]}},
        {"x": PLACE | {"data_offsets": [4, 12]}},
        {"x": PLACE | {"data_offsets": "ab"}},
        {"x": PLACE, "y": PLACE},
        {"x": PLACE | {"shape": [1], "data_offsets": [0, 4]}},
        {"x": PLACE, "__metadata__": {"partwise": "{"}},
        {"x": PLACE, "__metadata__": []},
        {"x": PLACE},
    ],
    ids=str,
)
def test_a_header_that_partwise_did_not_write_is_refused_with_and_without_arrays(tmp_path, told):
    write_header(tmp_path / "a", told, 8)
    for read in (checkpoint.read_header, checkpoint.load_arrays):
        with pytest.raises(UserError, match="a' is damaged or foreign"):
            read(tmp_path / "a")


@pytest.mark.parametrize("keep", [0, 4, 8, 50, -1])
def test_a_header_of_a_truncated_file_is_refused(tmp_path, keep):
    checkpoint.save_arrays(tmp_path / "a", ARRAYS, HEADER)
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:keep])
    with pytest.raises(UserError, match="a' is damaged or foreign"):
        checkpoint.read_header(tmp_path / "a")


def test_a_header_that_is_too_long_or_too_deep_is_refused_and_a_missing_file_named(tmp_path):
    (tmp_path / "a").write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(tmp_path / "a", 1 << 41)
    with pytest.raises(UserError, match=r"announces a header of \d+ bytes, where there can be 100000000"):
        checkpoint.read_header(tmp_path / "a")
    (tmp_path / "a").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    for read in (checkpoint.read_header, checkpoint.load_arrays):
        with pytest.raises(UserError, match="a' is damaged or foreign"):
            read(tmp_path / "a")
    with pytest.raises(UserError, match=r"could not read '.*gone': No such file"):
        checkpoint.read_header(tmp_path / "gone")


def test_writing_takes_no_copy_of_the_arrays_and_reading_takes_the_arrays_alone(tmp_path):
    code = """
import resource, sys, numpy as np
from pathlib import Path
from partwise.checkpoint import load_tree, save_tree
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
array = np.ones(1 << 24, np.float32)
start = peak()
save_tree(Path(sys.argv[1]), [array], {})
saved = peak()
loaded, _ = load_tree(Path(sys.argv[1]), [array])
print((saved - start) / array.nbytes, (peak() - saved) / array.nbytes, np.array_equal(array, loaded[0]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], check=True, capture_output=True, text=True
    )
    writing, reading, equal = done.stdout.split()
    assert float(writing) < 0.5
    assert float(reading) < 1.5
    assert equal == "True"


@pytest.mark.parametrize("count", [10, 1 << 19])
def test_a_long_document_is_one_line_and_a_short_one_is_indented(tmp_path, count):
    document = {"ids": {"item": list(range(count)), "word": ["a", "é"]}, "nothing": None}
    checkpoint.save_json(tmp_path / "some.json", document)
    assert ((tmp_path / "some.json").read_text().count("\n") == 1) == (count > 10)
    assert checkpoint.load_json(tmp_path / "some.json") == document
