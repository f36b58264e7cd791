"""Versions of the model as files: what a device reads out of them is what `send` would have sent it, whatever the
server of the files does."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partwise.checkpoint import from_bytes, to_bytes
from partwise.deployment.files import FolderPlace, open_place
from partwise.deployment.http_files import GoneError, HttpFiles
from partwise.deployment.manifest import files_of, read_manifest, write_manifest
from partwise.deployment.page_reader import Reader
from partwise.deployment.pages import read_version, write_order, write_pages, write_whole
from partwise.deployment.ranges import Piece, merge
from partwise.model.partition import frozen, keyed, local, partition
from partwise.model.spec import Model
from partwise.server.messages import About, read_slices, send
from partwise.types import UserError

RNG = jax.random.key(3)


def parts_of(num_items, num_words, psi="take"):
    """Two key spaces, one with two leaves; a frozen leaf of whole numbers; a local one."""
    shapes = {
        "item": (num_items, 3),
        "offset": (num_items,),
        "word": (4, num_words),
        "bias": (2,),
        "user": (2,),
    }
    start = {path: jnp.zeros(shape) for path, shape in shapes.items()} | {"table": jnp.arange(3)}
    rules = {
        "item": keyed("item", psi=psi),
        "offset": keyed("item"),
        "word": keyed("word", axis=1, psi=psi),
        "user": local(),
        "table": frozen(),
    }
    return partition(Model(lambda rng: start, None, None), rules)


def leaves_of(parts, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda s: (
        rng.standard_normal(s.shape).astype(s.dtype) if s.dtype != np.int32 else np.arange(3, dtype="i4")
    )
    return {path: draw(shape) for path, shape in parts.server_shapes.items()}


def orders_for(place, parts, page_rows, seed=0):
    rng = np.random.default_rng(seed)
    rows = lambda count: min(page_rows, count)
    return {s: write_order(place, rng.permutation(n), rows(n)) for s, n in parts.all_keys.items()}


class Direct:
    """The files of a place, without a network between."""

    def __init__(self, place):
        self.place = place

    def get_many(self, bounds):
        found = {name: self.place.read(name) for name in bounds}
        assert all(len(data) <= bounds[name] for name, data in found.items())
        return found

    def get_ranges(self, name, pieces):
        data = self.place.read(name)
        return [data[piece.begin : piece.end] for piece in pieces], len(data)


def assert_equal(found, expected):
    assert found.about == expected.about
    np.testing.assert_array_equal(found.rng, expected.rng)
    assert set(found.params) == set(expected.params)
    for path, leaf in expected.params.items():
        assert found.params[path].dtype == leaf.dtype
        assert found.params[path].shape == leaf.shape
        assert found.params[path].tobytes() == leaf.tobytes()


class Published:
    """A version in a folder, written in both ways."""

    def __init__(self, folder, num_items=20, num_words=5, page_rows=4, psi="take", where=np.asarray):
        self.place, self.parts = FolderPlace(folder), parts_of(num_items, num_words, psi)
        self.params = {path: where(leaf) for path, leaf in leaves_of(self.parts).items()}
        self.about = About("run", 7, "", self.parts.digest)
        self.orders = orders_for(self.place, self.parts, page_rows)
        given = (self.place, self.parts, self.params, RNG, self.about)
        self.version, self.whole = write_pages(*given, self.orders), write_whole(*given)

    def expected(self, keys, about=None):
        return read_slices(self.parts, send(self.parts, self.params, keys, RNG, about or self.about), keys)

    def page_of(self, key):
        """The path of the page with this item."""
        order = self.orders["item"]
        page = int(np.flatnonzero(order.keys == key)[0]) // order.page_rows
        return self.place.folder / f"{self.version.digests['item'][page].tobytes().hex()}.safetensors"


def keys_of(items, words=()):
    return {"item": np.array(items, np.int64), "word": np.array(words, np.int64)}


@settings(max_examples=30)
@given(
    st.sampled_from(["take", "float16", "int8"]),
    st.sampled_from([np.asarray, jnp.asarray]),
    st.integers(1, 9),
    st.integers(1, 7),
    st.data(),
)
@pytest.mark.slow
def test_slices_from_files_are_those_that_are_sent(tmp_path_factory, psi, where, num_items, page_rows, data):
    one = Published(tmp_path_factory.mktemp("files"), num_items, 5, page_rows, psi, where)
    some = lambda count: data.draw(st.lists(st.integers(0, count - 1), unique=True))
    keys = keys_of(some(num_items), some(5))
    reader = Reader(Direct(one.place), None, one.parts)
    expected = one.expected(keys)
    assert_equal(reader.slices(one.version.name, keys), expected)
    assert_equal(reader.slices(one.whole, keys), expected)
    assert_equal(reader.rows(one.whole, keys, gap=data.draw(st.sampled_from([0, 20, 4096]))), expected)


@pytest.mark.parametrize("page_rows", [1, 4, 7, 20])
@pytest.mark.parametrize("items", [[], [3], [19, 0, 7], list(range(20))])
def test_over_nginx(tmp_path, nginx, page_rows, items):
    one = Published(tmp_path / "files", page_rows=page_rows, psi="int8")
    files = HttpFiles(nginx(one.place.folder), patience=20)
    reader, keys, task = (
        Reader(files, tmp_path / "cache", one.parts),
        keys_of(items, [4, 1]),
        one.about._replace(task="t"),
    )
    expected = one.expected(keys, task)
    assert_equal(reader.slices(one.version.name, keys, task), expected)
    received = files.received
    assert_equal(reader.slices(one.version.name, keys, task), expected)
    assert files.received == received
    assert_equal(reader.slices(one.whole, keys, task), expected)
    assert_equal(reader.rows(one.whole, keys, task), expected)
    files.close()


def test_a_model_without_keys(tmp_path):
    parts = partition(Model(lambda rng: {"bias": jnp.ones(2)}, None, None), {})
    place, params = FolderPlace(tmp_path), {"bias": np.ones(2, np.float32)}
    version = write_pages(place, parts, params, RNG, About(model=parts.digest), {})
    found = Reader(Direct(place), None, parts).slices(version.name, {})
    np.testing.assert_array_equal(found.params["bias"], 1)


def test_files_in_a_bucket(tmp_path, s3):
    folder, bucket = Published(tmp_path), open_place(s3("pages"))
    given = (bucket, folder.parts, folder.params, RNG, folder.about)
    version = write_pages(*given, orders_for(bucket, folder.parts, 4))
    assert version.name == folder.version.name
    assert bucket.names() | {write_whole(*given)} == folder.place.names()
    keys = keys_of([1, 2], [3])
    assert_equal(Reader(Direct(bucket), None, folder.parts).slices(version.name, keys), folder.expected(keys))
    assert read_version(bucket, folder.parts, version.name).name == version.name


@settings(max_examples=30)
@given(st.sampled_from(["take", "int8"]), st.lists(st.integers(0, 19), max_size=8), st.integers(1, 20))
def test_only_what_changed_is_written(tmp_path_factory, psi, rows, page_rows):
    one = Published(tmp_path_factory.mktemp("files"), page_rows=page_rows, psi=psi)
    after = {path: leaf.copy() for path, leaf in one.params.items()}
    after["item"][rows], after["bias"][0] = 9.5, 2.0
    about, rng = one.about._replace(version=8), jax.random.key(4)
    changed = {"item": np.array(rows, np.int64), "word": np.array([], np.int64)}
    before = one.place.names()
    fast = write_pages(one.place, one.parts, after, rng, about, one.orders, one.version, changed)
    pages = len({int(np.flatnonzero(one.orders["item"].keys == row)[0]) // page_rows for row in rows})
    assert (
        len(one.place.names() - before) == pages + bool(rows) + 2
    )  # an index, the shared leaves, the manifest
    whole = write_pages(FolderPlace(tmp_path_factory.mktemp("all")), one.parts, after, rng, about, one.orders)
    again = read_version(one.place, one.parts, fast.name)
    for other in (whole, again):
        assert other.name == fast.name
        assert all(np.array_equal(other.digests[space], each) for space, each in fast.digests.items())


def test_another_cut_writes_everything(tmp_path):
    one = Published(tmp_path)
    orders = orders_for(one.place, one.parts, 2)
    nothing = {"item": np.array([], np.int64), "word": np.array([], np.int64)}
    given = (one.place, one.parts, one.params, RNG, one.about, orders)
    assert write_pages(*given, one.version, nothing).name == write_pages(*given).name != one.version.name


def test_what_to_keep_for_a_version(tmp_path):
    one = Published(tmp_path)
    kept = files_of(one.parts, one.version.name, one.place.read)
    assert kept == one.place.names() - {one.whole}
    one.place.put(b"old", "json")
    one.place.delete(one.place.names() - kept)
    keys = keys_of(range(20), range(5))
    assert_equal(
        Reader(Direct(one.place), None, one.parts).slices(one.version.name, keys), one.expected(keys)
    )


def test_bad_orders(tmp_path):
    one = Published(tmp_path)
    for keys in ([0, 0, 1], [1, 2, 3], [[0, 1]]):
        with pytest.raises(UserError, match="every key from 0 to"):
            write_order(one.place, np.array(keys), 1)
    for page_rows in (0, 4):
        with pytest.raises(UserError, match="a page has 1 to 3 rows"):
            write_order(one.place, np.arange(3), page_rows)
    with pytest.raises(UserError, match=r"key spaces are item, word, .* orders for item"):
        write_pages(one.place, one.parts, one.params, RNG, one.about, {"item": one.orders["item"]})


def test_bytes_as_the_document_says(tmp_path):
    """Golden: read by hand what docs/protocol.md describes."""
    one = Published(tmp_path, num_items=6, num_words=2, page_rows=4)
    manifest = json.loads((tmp_path / one.version.name).read_bytes())
    assert list(manifest) == ["format", "kind", "run", "version", "model", "rng", "shared", "spaces"]
    assert (manifest["format"], manifest["kind"], manifest["rng"]) == (1, "manifest", [0, 3])
    item = manifest["spaces"]["item"]
    assert (item["num_keys"], item["page_rows"], len(item["index"])) == (6, 4, 1)
    order = np.frombuffer((tmp_path / item["order"]).read_bytes()[-24:], "<i4")
    block = (tmp_path / item["index"][0]).read_bytes()
    assert len(block) == 32
    last = (tmp_path / f"{block[16:].hex()}.safetensors").read_bytes()
    length = int.from_bytes(last[:8], "little")
    header = json.loads(last[8 : 8 + length])
    assert header.pop("__metadata__") == {"partwise": "{}"}
    assert header == {
        "item:rows": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "offset:rows": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
    }
    rows = np.frombuffer(last[8 + length :][:24], "<f4").reshape(2, 3)
    np.testing.assert_array_equal(rows, one.params["item"][order[4:]])
    assert set(from_bytes((tmp_path / manifest["shared"]).read_bytes())[0]) == {"bias", "table"}


# What goes over the wire


@pytest.mark.slow
def test_bytes_of_a_device_with_few_keys(tmp_path, nginx):
    """1,000 of 100,000 rows, by pages of 8: at most a tenth of the file; in the next round only what changed."""
    num_keys, rng = 100_000, np.random.default_rng(1)
    start = lambda _: {"item": jnp.zeros((num_keys, 96)), "bias": jnp.zeros(4)}
    parts = partition(Model(start, None, None), {"item": keyed("item")})
    params = {"item": rng.standard_normal((num_keys, 96), np.float32), "bias": np.zeros(4, np.float32)}
    place, about = FolderPlace(tmp_path / "files"), About("run", 0, "", parts.digest)
    hottest = rng.permutation(num_keys)
    chance = 1 / np.arange(1, num_keys + 1)
    own = lambda: np.sort(hottest[rng.choice(num_keys, 1000, replace=False, p=chance / chance.sum())])
    orders = {"item": write_order(place, hottest, 8)}
    first = write_pages(place, parts, params, RNG, about, orders)
    whole = (tmp_path / "files" / write_whole(place, parts, params, RNG, about)).stat().st_size
    keys, changed = {"item": own()}, {"item": own()}

    files = HttpFiles(nginx(tmp_path / "files"))
    reader = Reader(files, tmp_path / "cache", parts)
    found = reader.slices(first.name, keys)
    np.testing.assert_array_equal(found.params["item"], params["item"][keys["item"]])
    assert files.received <= 0.1 * whole

    params["item"][changed["item"]] += 1
    second = write_pages(place, parts, params, RNG, about._replace(version=1), orders, first, changed)
    before, files.received = files.received, 0
    found = reader.slices(second.name, keys)
    np.testing.assert_array_equal(found.params["item"], params["item"][keys["item"]])
    old, new = first.digests["item"], second.digests["item"]
    page = np.unique(np.argsort(hottest)[keys["item"]] // 8)
    same = (old[page] == new[page]).all(axis=1).sum()
    assert 0 < same < len(page)
    assert files.received <= before - same * 8 * 96 * 4 - num_keys * 4  # the order, too, stays


def test_a_damaged_cache_and_one_that_cannot_be_written(tmp_path, nginx):
    one, keys = Published(tmp_path / "files"), keys_of(range(20), range(5))
    url = nginx(one.place.folder)
    reader = Reader(HttpFiles(url), tmp_path / "cache", one.parts)
    reader.slices(one.version.name, keys)
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    assert_equal(reader.slices(one.version.name, keys), one.expected(keys))
    (tmp_path / "file").write_text("")
    reader = Reader(HttpFiles(url), tmp_path / "file", one.parts)
    assert_equal(reader.slices(one.version.name, keys), one.expected(keys))


@pytest.mark.parametrize("kind", ["truncated", "flipped", "another"])
def test_pages_that_are_wrong_at_the_server(tmp_path, nginx, kind):
    one = Published(tmp_path / "files")
    path, keys = one.page_of(3), keys_of([3, 4, 5])
    good = path.read_bytes()
    other = Published(tmp_path / "other", psi="int8").page_of(3).read_bytes()
    bad = {"truncated": good[:-5], "flipped": good[:-5] + b"\x80" + good[-4:], "another": other}
    path.write_bytes(bad[kind])
    reader = Reader(HttpFiles(nginx(one.place.folder)), tmp_path / "cache", one.parts)
    with pytest.raises(UserError, match=rf"{path.name}' came 3 times with other bytes"):
        reader.slices(one.version.name, keys)
    path.write_bytes(good)
    assert_equal(reader.slices(one.version.name, keys), one.expected(keys))


def test_files_that_are_gone(tmp_path, nginx):
    one, keys = Published(tmp_path / "files"), keys_of([3], [1])
    reader = Reader(HttpFiles(nginx(one.place.folder)), None, one.parts)
    one.page_of(3).unlink()
    with pytest.raises(GoneError, match="its manifest is stale"):
        reader.slices(one.version.name, keys)
    (one.place.folder / one.version.name).unlink()
    with pytest.raises(GoneError, match=rf"{one.version.name}' is not there"):
        reader.slices(one.version.name, keys)
    (one.place.folder / one.whole).unlink()
    with pytest.raises(GoneError, match=rf"{one.whole}' is not there"):
        reader.rows(one.whole, keys)


def test_ranges_of_a_server_that_ignores_them_and_of_files_that_are_short(tmp_path, nginx):
    one, keys = Published(tmp_path / "files"), keys_of([3], [1])
    reader = Reader(HttpFiles(nginx(one.place.folder, "max_ranges 0;")), None, one.parts)
    with pytest.raises(UserError, match="must have status 206, and has 200"):
        reader.rows(one.whole, keys)
    reader = Reader(HttpFiles(nginx(one.place.folder)), None, one.parts)
    path = one.place.folder / one.whole
    for size, what in (
        (path.stat().st_size - 4, "its arrays take"),
        (100, "no arrays written"),
        (0, "has 200"),
    ):
        os.truncate(path, size)
        with pytest.raises(UserError, match=what):
            reader.rows(one.whole, keys)


def test_a_long_header_comes_in_two_pieces(tmp_path):
    start = lambda _: {
        f"a_leaf_with_a_long_name_{number:04}": jnp.full(2, number) * 1.0 for number in range(99)
    }
    parts = partition(Model(start, None, None), {})
    place, params = FolderPlace(tmp_path), {path: np.asarray(leaf) for path, leaf in start(0).items()}
    name = write_whole(place, parts, params, RNG, About(model=parts.digest))
    found = Reader(Direct(place), None, parts).rows(name, {})
    assert {path: leaf.tolist() for path, leaf in found.params.items()} == {
        path: leaf.tolist() for path, leaf in params.items()
    }


def test_neighbours_are_fetched_together():
    pieces = [Piece(30, 40), Piece(0, 10), Piece(10, 20), Piece(25, 28), Piece(35, 36), Piece(9, 9)]
    assert merge(pieces, 0) == [Piece(0, 20), Piece(25, 28), Piece(30, 40)]
    assert merge(pieces, 4) == [Piece(0, 20), Piece(25, 40)]
    assert merge(pieces, 5) == [Piece(0, 40)]
    assert merge([], 5) == []


# What a device does with bad keys, stale and foreign versions


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"item": np.array([0])}, "keys must be given for item, word"),
        (keys_of([20]), r"keys of 'item' are 0 to 19, not 20 to 20"),
        (keys_of([0], [-1]), r"keys of 'word' are 0 to 4, not -1"),
    ],
)
def test_bad_keys(tmp_path, keys, what):
    one = Published(tmp_path)
    reader = Reader(Direct(one.place), None, one.parts)
    for call in (
        lambda: reader.slices(one.version.name, keys),
        lambda: reader.slices(one.whole, keys),
        lambda: reader.rows(one.whole, keys),
    ):
        with pytest.raises(UserError, match=what):
            call()


def test_a_version_of_another_run_round_or_model(tmp_path):
    one = Published(tmp_path)
    reader = Reader(Direct(one.place), None, one.parts)
    for about in (one.about._replace(run="other"), one.about._replace(version=8)):
        for call in (reader.slices, reader.rows):
            with pytest.raises(
                UserError, match="files are of version 7 of the run 'run', and the task is of"
            ):
                call(one.whole, keys_of([1]), about)
        with pytest.raises(UserError, match="files are of version 7 of the run 'run', and the task is of"):
            reader.slices(one.version.name, keys_of([1]), about)
    other = Reader(Direct(one.place), None, parts_of(20, 5, "int8"))
    for call in (
        lambda: other.slices(one.version.name, keys_of([1])),
        lambda: other.rows(one.whole, keys_of([1])),
    ):
        with pytest.raises(UserError, match="another model"):
            call()


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"format": 2}, "manifest in format 1, and it is 'manifest' in format 2"),
        ({"kind": "slices"}, "it is 'slices'"),
        ({"version": "7"}, "must say its version"),
        ({"rng": [0, 1 << 32]}, "must say its rng"),
        ({"rng": None}, "must say its rng"),
        ({"shared": "../../etc/passwd"}, "no name of a file"),
        ({"spaces": []}, "must have the key spaces item, word"),
        ({"spaces": {}}, "must have the key spaces item, word"),
    ],
)
def test_manifests_that_lie(tmp_path, wrong, what):
    one = Published(tmp_path)
    document = json.loads(one.place.read(one.version.name))
    with pytest.raises(UserError, match=what):
        read_manifest(one.parts, json.dumps(document | wrong).encode())


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"num_keys": 21}, "has 20 keys, and the manifest says 21"),
        ({"num_keys": True}, "has 20 keys"),
        ({"page_rows": 0}, "1 to 20 rows"),
        ({"page_rows": 1 << 60}, "1 to 20 rows"),
        ({"page_rows": "4"}, "1 to 20 rows"),
        ({"index": []}, "must have 1 files, and the manifest names 0"),
        ({"index": "x"}, "must say num_keys"),
        ({"index": [None]}, "no name of a file"),
        ({"more": 1}, "must say num_keys"),
        ({"order": None}, "no name of a file"),
    ],
)
def test_manifests_that_lie_of_a_space(tmp_path, wrong, what):
    one = Published(tmp_path)
    document = json.loads(one.place.read(one.version.name))
    document["spaces"]["item"] |= wrong
    with pytest.raises(UserError, match=what):
        read_manifest(one.parts, json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_manifest(data):
    with pytest.raises(UserError, match="no manifest"):
        read_manifest(parts_of(2, 2), data)


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        ("page", "'item:rows' in the page is float32"),
        ("index", "block of the index has 64 bytes, and must have 80"),
        ("twice", "does not have every key"),
        ("range", "does not have every key"),
        ("shared", "the page lacks"),
        ("text", "no arrays written by partwise"),
    ],
)
def test_files_with_the_right_digest_that_lie(tmp_path, lie, what):
    """A server that signs nonsense: the digests fit, and the content does not."""
    one = Published(tmp_path)
    place, item = one.place, one.version.manifest.spaces["item"]
    arrays = {"item:rows": np.zeros((9, 3), np.float32), "offset:rows": np.zeros(9, np.float32)}
    pages = {"page": to_bytes(arrays), "text": b"\xff" * 100}
    if lie in pages:
        block = bytes.fromhex(place.put(pages[lie], "safetensors")[:32]) * 5
        item = item._replace(index=(place.put(block, "index"),))
    elif lie == "index":
        item = item._replace(index=(place.put(place.read(item.index[0])[:64], "index"),))
    elif lie in ("twice", "range"):
        order = np.arange(20, dtype=np.int32)
        order[3] = {"twice": 4, "range": 20}[lie]
        item = item._replace(order=place.put(to_bytes({"order": order}), "safetensors"))
    manifest = one.version.manifest
    manifest = manifest._replace(spaces={**manifest.spaces, "item": item})
    if lie == "shared":
        manifest = manifest._replace(shared=place.put(to_bytes({}), "safetensors"))
    name = place.put(write_manifest(manifest), "json")
    with pytest.raises(UserError, match=what):
        Reader(Direct(place), None, one.parts).slices(name, keys_of([0, 5]))
