from __future__ import annotations

import errno
import os
import subprocess
import sys
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


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "uint32", "int64", "bool"],
)
def test_every_type_of_number_comes_back(dtype):
    array = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))
    (back,) = checkpoint.from_bytes(checkpoint.to_bytes({"x": array}))[0].values()
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
