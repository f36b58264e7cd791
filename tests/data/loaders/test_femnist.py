"""LEAF's FEMNIST: its JSON files as LEAF writes them, the sample, and what is wrong with either."""

from __future__ import annotations

import json

import numpy as np
import pytest

from partwise.data.loaders import femnist
from partwise.types import UserError


def image(*inked: int) -> list[float]:
    """As LEAF stores it: ink 0.0 on 1.0."""
    return [0.0 if k in inked else 1.0 for k in range(784)]


def writers(**labels: list[int]) -> dict:
    """A file of LEAF's. The k-th image of a writer has ink at pixel k."""
    data = {name: {"x": [image(k) for k in range(len(each))], "y": each} for name, each in labels.items()}
    return {"users": list(labels), "num_samples": [len(each) for each in labels.values()], "user_data": data}


def write(path, told) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(told if isinstance(told, str) else json.dumps(told))


def sample(**changes) -> dict[str, np.ndarray]:
    arrays = {
        "images": np.arange(7, dtype=np.uint8)[:, None, None] * np.ones((7, 28, 28), np.uint8),
        "labels": np.array([0, 10, 61, 5, 6, 7, 8], np.uint8),
        "writer": np.array([0, 2, 2, 1, 2, 1, 1], np.int16),
        "writer_ids": np.array(["f0", "f1", "f2"]),
        "complete": np.array([False, True, True]),
    }
    return {name: values for name, values in (arrays | changes).items() if values is not None}


def test_images_are_turned_over_and_divided(tmp_path):
    write(tmp_path / "all_data_0.json", writers(f1=list(range(20)), f2=list(range(10, 40))))
    write(tmp_path / "all_data_1.json", writers(f3=list(range(42, 62)), f4=[1, 2], f5=[]))
    train, test = femnist.load(tmp_path, min_images=10)
    assert train.client_ids.tolist() == test.client_ids.tolist() == ["f1", "f2", "f3"]
    assert (train.counts.tolist(), test.counts.tolist()) == ([18, 27, 18], [2, 3, 2])
    for store in (train, test):
        mine = store.examples(1)
        assert (mine["pixels"].dtype, mine["label"].dtype) == (np.uint8, np.int32)
        assert mine["pixels"].reshape(-1, 784).argmax(axis=1).tolist() == (mine["label"] - 10).tolist()
        assert mine["pixels"].max() == 255
        assert (mine["pixels"] > 0).sum() == len(mine["label"])
    both = np.concatenate([store.examples(1)["label"] for store in (train, test)])
    assert sorted(both) == list(range(10, 40))
    other = femnist.load(tmp_path, min_images=10, seed=1)[1]
    assert other.examples(1)["label"].tolist() != test.examples(1)["label"].tolist()


def test_the_split_of_leaf_is_kept(tmp_path):
    write(tmp_path / "data/train/a_9.json", writers(f1=[1, 2, 3], f2=[4]))
    write(tmp_path / "data/test/a_1.json", writers(f1=[5], f2=[6]))
    write(tmp_path / "data/all_data/all_data_0.json", writers(f1=[1, 2, 3, 5], f2=[4, 6]))
    train, test = femnist.load(tmp_path, min_images=3)
    assert (train.columns["label"][:3].tolist(), train.counts.tolist()) == ([1, 2, 3], [3])
    assert test.examples(0)["label"].tolist() == [5]
    assert (train.info["split"], test.info["split"], train.info["classes"]) == ("train", "test", 62)


def test_only_complete_writers_of_the_sample(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "femnist_leaf_sample.npz", **sample())
    train, test = femnist.load(tmp_path, min_images=1)
    assert train.client_ids.tolist() == ["f1", "f2"]
    for k, expected in enumerate(([5, 7, 8], [10, 61, 6])):
        found = [store.examples(k) for store in (train, test)]
        assert sorted(np.concatenate([each["label"] for each in found])) == sorted(expected)
        at = {int(label): int(row) for row, label in enumerate(sample()["labels"])}
        for each in found:
            assert each["pixels"][:, 0, 0].tolist() == [at[int(label)] for label in each["label"]]
    monkeypatch.setenv("PARTWISE_DATA", str(tmp_path))
    assert femnist.load(min_images=1)[0].counts.tolist() == train.counts.tolist()


def test_what_is_recognised(tmp_path):
    (tmp_path / "femnist-sample").mkdir()
    np.savez(tmp_path / "femnist-sample" / femnist.SAMPLE, **sample())
    assert femnist.locate(tmp_path / "femnist-sample") == tmp_path / "femnist-sample"
    assert femnist.locate(tmp_path / "femnist-sample" / femnist.SAMPLE)
    assert femnist.locate(None) is femnist.locate(tmp_path) is None  # a folder of several data sets
    assert femnist.locate(tmp_path / "mnist_by_writer.npz") is None
    assert femnist.load(tmp_path, min_images=1)[0].num_clients == 2


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("[1]", r"a.json is not in LEAF's form: expected an object with users and user_data"),
        ({"users": []}, r"not in LEAF's form"),
        (writers(f1=[1]) | {"users": ["f2"]}, r"not in LEAF's form"),
        ('{"users": ["f1"], "user_', r"a.json cannot be read \(JSONDecodeError"),
        ({"user_data": {"f1": {"x": []}}}, r"writer f1: .*expected an object"),
        (
            {"user_data": {"f1": {"x": [image()], "y": [62]}}},
            r"writer f1, y: 62 in example 0; expected 0 to 61",
        ),
        ({"user_data": {"f1": {"x": [image()], "y": ["a"]}}}, r"writer f1, y: .*expected one whole number"),
        (
            {"user_data": {"f1": {"x": [image()], "y": [1, 2]}}},
            r"1 images and 2 labels; expected a label for",
        ),
        ({"user_data": {"f1": {"x": [[1.0, 2.0]], "y": [1]}}}, r"x: images of shape \(2,\); expected 784"),
        ({"user_data": {"f1": {"x": [[255.0] * 784], "y": [1]}}}, r"x: 255.0 in example 0; expected numbers"),
        (
            {"user_data": {"f1": {"x": [image(), [1]], "y": [1, 2]}}},
            r"writer f1, x: .*expected images of 784",
        ),
        ({"user_data": {"f1": {"x": ["so tired"], "y": [1]}}}, r"writer f1, x: .*expected images of 784"),
        (
            writers(f1=[1]),
            r"no writer of the part 'all' has at least 50 images in all, the most of any writer is 1; lower",
        ),
        (
            {"user_data": {"f1": {"x": [image()], "y": []}}},
            r"writer f1, y: .*\[0\]; expected one whole number",
        ),
        (writers(f1=[1, 2]) | {"num_samples": [3]}, r"writer f1: num_samples is 3, and there are 2 labels"),
        (
            json.dumps(writers(f1=[1], f2=[2])).replace('"f2": {', '"f1": {'),
            r"a.json has 'f1' twice in one object; expected it once",
        ),
    ],
)
def test_bad_json_is_named(tmp_path, told, message):
    write(tmp_path / "a.json", told)
    with pytest.raises(UserError, match=message):
        femnist.load(tmp_path / "a.json")


def test_writers_whose_names_are_numbers_in_one_part_alone(tmp_path):
    write(tmp_path / "train/a.json", writers(**{"7": [1, 2], "8": [3, 4]}))
    write(tmp_path / "test/a.json", writers(**{"7": [5], "8": [6], "abc": [7]}))
    train, test = femnist.load(tmp_path, min_images=3)
    assert train.client_ids.tolist() == test.client_ids.tolist() == ["7", "8"]
    write(tmp_path / "train/a.json", writers(g=[1]))
    write(tmp_path / "test/a.json", writers(h=[1, 2, 3]))
    with pytest.raises(
        UserError, match="part 'train' has at least 2 images in all, the most of any writer is 3"
    ):
        femnist.load(tmp_path, min_images=2)


def test_a_writer_in_two_files_is_named(tmp_path):
    for number in range(2):
        write(tmp_path / f"all_data_{number}.json", writers(f1=[1, 2]))
    with pytest.raises(UserError, match=r"all_data_0.json.*client f1 turns up twice"):
        femnist.load(tmp_path, min_images=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((7, 784), np.uint8)}, r"images: uint8 \[7, 784\]; expected uint8 \[N, 28, 28\]"),
        ({"labels": np.full(7, 62)}, r"labels: 62 in example 0; expected 0 to 61"),
        ({"labels": np.zeros(6, int)}, r"arrays of lengths .*'labels': 6"),
        ({"writer": np.full(7, 3)}, r"writer: 3 in example 0; expected 0 to 2"),
        ({"complete": np.ones(2, bool)}, r"complete bool \[2\]; expected a name and a true or false"),
        ({"complete": None}, r"unknown array 'complete'"),
    ],
)
def test_a_bad_sample_is_named(tmp_path, changes, message):
    np.savez(tmp_path / femnist.SAMPLE, **sample(**changes))
    with pytest.raises(UserError, match=message):
        femnist.load(tmp_path)


def test_bad_places_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    with pytest.raises(UserError, match=r"no path to LEAF's FEMNIST was given: .*set PARTWISE_DATA"):
        femnist.load()
    write(tmp_path / "train/a.json", writers(f1=[1]))
    with pytest.raises(UserError, match=r"holds no FEMNIST: looked for LEAF's train.*found train"):
        femnist.load(tmp_path)


def test_the_real_sample(data_root):
    train, test = femnist.load(data_root)
    assert (train.num_clients, train.num_examples + test.num_examples) == (287, 48_371)
    assert test.num_examples == pytest.approx(0.1 * 48_371, rel=0.05)
    assert set(np.unique(train.columns["label"])) == set(range(62))
    assert 255 - train.columns["pixels"].mean() == pytest.approx(0.96 * 255, abs=2)  # LEAF's images are thin
