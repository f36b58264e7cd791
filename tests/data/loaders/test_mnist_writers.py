from __future__ import annotations

import lzma

import numpy as np
import pytest

from partwise.data.loaders import mnist_writers as handwriting
from partwise.data.loaders.mnist_writers import load_emnist, load_mnist_by_writer
from partwise.data.store import open_store
from partwise.types import UserError

WHITE, INK = [1.0] * 784, 0.0


def image(*inked: int) -> list[float]:
    """As TFF stores it: ink 0.0 on 1.0."""
    return [INK if k in inked else value for k, value in enumerate(WHITE)]


def example(label: int, *inked: int) -> dict:
    return {"pixels": image(*inked), "label": label}


EMNIST = {
    "all_train": {"f0_2": [example(61, 0, 27), example(3)], "f0_1": [example(10, 783)]},
    "all_test": {"f0_1": [example(5, 1)], "f0_2": [example(6, 2)]},
    "digits_only_train": {"f0_2": [example(3)]},
    "digits_only_test": {"f0_2": [example(9)]},
}


def to_hdf5(clients: dict) -> dict:
    return {
        client: {
            "pixels": np.array([e["pixels"] for e in examples], np.float32).reshape(-1, 28, 28),
            "label": np.array([e["label"] for e in examples], np.int32),
        }
        for client, examples in clients.items()
    }


@pytest.fixture
def emnist(tmp_path, write_sqlite):
    return write_sqlite(tmp_path / "emnist_all.sqlite", EMNIST)


def small_mnist(**changes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (6, 28, 28)).astype(np.uint8),
        "labels": np.array([3, 1, 4, 1, 5, 9], np.uint8),
        "writer": np.array([0, 0, 7, 7, 2100, 2100], np.int16),
        "split": np.array([0, 0, 0, 0, 1, 1], np.uint8),
    }
    return {name: values for name, values in (arrays | changes).items() if values is not None}


def test_the_real_mnist_by_writer(data_root):
    train, test = load_mnist_by_writer(data_root)
    assert (train.num_clients, train.num_examples) == (539, 60_000)
    assert (test.num_clients, test.num_examples) == (297, 10_000)
    assert not set(train.client_ids) & set(test.client_ids)
    assert [np.median(store.counts) for store in (train, test)] == [116, 21]
    for store in (train, test):
        assert store.info["published_counts"] is True
        assert store.columns["pixels"].shape == (store.num_examples, 28, 28)
        assert store.columns["pixels"].dtype == np.uint8
        assert store.columns["label"].dtype == np.int32
        assert set(np.unique(store.columns["label"])) == set(range(10))
        assert store.columns["pixels"][:, 0].mean() < 1  # the border is background
        assert store.columns["pixels"].mean() / 255 == pytest.approx(0.131, abs=0.003)
    assert load_mnist_by_writer(data_root / "mnist-by-writer")[0].info == train.info


def test_rows_of_mnist_stay_with_their_writer(tmp_path):
    arrays = small_mnist()
    np.savez_compressed(tmp_path / "mnist_by_writer.npz", **arrays)
    train, test = load_mnist_by_writer(tmp_path)
    assert train.client_ids.tolist() == [0, 7]
    assert test.client_ids.tolist() == [2100]
    assert train.examples(1)["label"].tolist() == [4, 1]
    assert np.array_equal(train.examples(1)["pixels"], arrays["images"][2:4])
    assert np.array_equal(test.examples(0)["pixels"], arrays["images"][4:])
    assert train.info["published_counts"] is False
    assert (train.info["writers"], train.info["images"], train.info["split"]) == (2, 4, "train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((6, 784), np.uint8)}, r"images: uint8 \[6, 784\]; expected uint8 \[N, 28, 28\]"),
        ({"images": np.zeros((6, 28, 28))}, r"images: float64 .*expected uint8"),
        ({"labels": np.array([0, 1, 2, 10, 0, 0])}, r"labels: 10 in example 3; expected 0 to 9"),
        ({"labels": np.zeros(6)}, r"labels: float64 \[6\]; expected one whole number"),
        ({"labels": np.zeros(5, int)}, r"arrays of lengths .*'labels': 5"),
        ({"split": np.zeros(6, int)}, r"splits \[0\]; expected 0 \(train\) and 1"),
        ({"writer": None}, r"mnist_by_writer.npz: unknown array 'writer' .*give the file"),
    ],
)
def test_bad_arrays_are_named(tmp_path, changes, message):
    np.savez(tmp_path / "mnist_by_writer.npz", **small_mnist(**changes))
    with pytest.raises(UserError, match=message):
        load_mnist_by_writer(tmp_path)


def test_damaged_npz_files_are_named(tmp_path):
    file = tmp_path / "mnist_by_writer.npz"
    np.savez_compressed(file, **small_mnist())
    content = file.read_bytes()
    broken = content[:500] + bytes(40) + content[540:]
    for damaged in (content[: len(content) // 2], broken, b"PK", b"", b"<html>not found</html>"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"mnist_by_writer.npz cannot be read .*is it a whole .npz file"):
            load_mnist_by_writer(file)
    np.save(tmp_path / "one.npy", np.arange(3))
    with pytest.raises(UserError, match=r"one.npy cannot be read .*is it a whole .npz file"):
        load_mnist_by_writer(tmp_path / "one.npy")


def test_emnist_is_turned_over_and_rounded(emnist):
    train, test = load_emnist(emnist)
    assert train.client_ids.tolist() == test.client_ids.tolist() == ["f0_1", "f0_2"]
    mine = train.examples(train.find("f0_2"))
    assert mine["label"].tolist() == [61, 3]
    assert mine["label"].dtype == np.int32
    assert mine["pixels"].dtype == np.uint8
    assert np.flatnonzero(mine["pixels"][0]).tolist() == [0, 27]
    assert mine["pixels"][0, 0, 27] == 255
    assert not mine["pixels"][1].any()
    assert train.examples(0)["pixels"][0, 27, 27] == 255
    assert test.examples(1)["label"].tolist() == [6]
    assert train.info["split"] == "all_train"
    assert train.info["classes"] == 62
    assert (train.info["writers"], train.info["images"]) == (2, 3)
    assert train.info["published_counts"] is False


def test_emnist_out_of_core_is_the_same(emnist, tmp_path):
    stores = load_emnist(emnist, out=tmp_path / "emnist")
    for part, held, stored in zip(("train", "test"), load_emnist(emnist), stores, strict=True):
        again = open_store(tmp_path / "emnist" / part)
        assert stored.info == again.info == held.info
        assert again.client_ids.tolist() == held.client_ids.tolist()
        for name in ("pixels", "label"):
            np.testing.assert_array_equal(again.gather().columns[name], held.columns[name])
    with pytest.raises(UserError, match="exists"):
        load_emnist(emnist, out=tmp_path / "emnist")


def test_only_digits(emnist):
    train, test = load_emnist(emnist, only_digits=True)
    assert train.columns["label"].tolist() == [3]
    assert test.columns["label"].tolist() == [9]
    assert train.info["classes"] == 10


def test_the_published_counts_are_recognised(emnist, monkeypatch):
    release = handwriting.RELEASES[False]._replace(counts={"train": (2, 3), "test": (2, 3)})
    monkeypatch.setitem(handwriting.RELEASES, False, release)
    train, test = load_emnist(emnist)
    assert train.info["published_counts"] is True
    assert test.info["published_counts"] is False


def test_every_way_to_point_at_emnist(emnist, tmp_path, write_sqlite, write_hdf5, monkeypatch):
    (tmp_path / "packed" / "emnist").mkdir(parents=True)
    packed = tmp_path / "packed" / "emnist" / "emnist_all.sqlite.lzma"
    packed.write_bytes(lzma.compress(emnist.read_bytes(), lzma.FORMAT_ALONE))
    (tmp_path / "hdf5").mkdir()
    for part in ("train", "test"):
        write_hdf5(tmp_path / "hdf5" / f"fed_emnist_{part}.h5", to_hdf5(EMNIST[f"all_{part}"]))
    plain = {part: EMNIST[f"all_{part}"] for part in ("train", "test")}
    write_sqlite(tmp_path / "own.sqlite", plain)
    monkeypatch.setenv("PARTWISE_DATA", str(tmp_path))
    places = [None, tmp_path, emnist, packed, tmp_path / "packed", tmp_path / "hdf5", tmp_path / "own.sqlite"]
    places += [tmp_path / "hdf5" / "fed_emnist_train.h5", tmp_path / "hdf5" / "fed_emnist_test.h5"]
    expected = load_emnist(emnist)
    for place in places:
        for found, store in zip(load_emnist(place), expected, strict=True):
            assert found.client_ids.tolist() == store.client_ids.tolist()
            for name, values in store.columns.items():
                assert np.array_equal(found.columns[name], values)
                assert found.columns[name].dtype == values.dtype


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pixels": image()[:-1], "label": 1}, r"client a, pixels: images of shape \(783,\); expected 784"),
        (
            {"pixels": [float("nan"), *image()[1:]], "label": 1},
            r"client a, pixels: nan in example 0; expected",
        ),
        (
            {"pixels": [255.0, *image()[1:]], "label": 1},
            r"pixels: 255.0 in example 0; expected numbers from 0",
        ),
        ({"pixels": image(), "label": 62}, r"client a, label: 62 in example 0; expected 0 to 61"),
        ({"pixels": image(), "label": -1}, r"client a, label: -1 in example 0"),
        ({"pixels": image(), "label": 1.5}, r"client a, label: float32 \[1\]; expected one whole number"),
        ({"pixels": image(), "lable": 1}, r"unknown feature 'label' \(nearest: lable"),
    ],
)
def test_bad_images_are_named(tmp_path, write_sqlite, bad, message):
    path = write_sqlite(tmp_path / "a.sqlite", {"train": {"a": [bad]}, "test": {"a": [example(1)]}})
    with pytest.raises(UserError, match=message):
        load_emnist(path)


def test_images_of_several_sizes_are_named(tmp_path, write_sqlite):
    rows = [example(1), {"pixels": [1.0, 1.0], "label": 1}]
    path = write_sqlite(tmp_path / "a.sqlite", {"train": {"a": rows}, "test": {"a": rows}})
    with pytest.raises(UserError, match=r"client a, pixels: images of differing shapes"):
        load_emnist(path)


def test_bad_places_are_named(tmp_path, write_sqlite, write_hdf5, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    for load in (load_mnist_by_writer, load_emnist):
        with pytest.raises(UserError, match=r"no path to .* was given: .*set PARTWISE_DATA"):
            load()
        with pytest.raises(UserError, match=r"nowhere does not exist: give the path of"):
            load(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds no mnist_by_writer.npz: looked for .*found notes.txt"):
        load_mnist_by_writer(tmp_path)
    with pytest.raises(
        UserError, match=r"holds no federated EMNIST \(https://.*lzma\): looked for emnist_all"
    ):
        load_emnist(tmp_path)
    with pytest.raises(UserError, match=r"notes.txt is neither an SQLite nor an HDF5 file"):
        load_emnist(tmp_path / "notes.txt")
    path = write_sqlite(tmp_path / "a.sqlite", {"other": {"a": [example(1)]}})
    with pytest.raises(UserError, match=r"a.sqlite has no split 'all_train': it has other"):
        load_emnist(path)
    alone = write_hdf5(tmp_path / "fed_emnist_train.h5", to_hdf5(EMNIST["all_train"]))
    with pytest.raises(UserError, match=r"fed_emnist_test.h5 does not exist: keep the files"):
        load_emnist(alone)
