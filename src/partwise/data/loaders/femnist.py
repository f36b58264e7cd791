"""LEAF's FEMNIST: handwritten digits and letters by writer, 62 classes.

Read are the JSON files that LEAF's `preprocess.sh` writes (`train/` and `test/`, or before its split
`all_data/all_data_*.json`), and `femnist_leaf_sample.npz`, a sample of LEAF's writers. Columns are those of
`mnist_writers`. LEAF stores ink as 0.0 on 1.0, which is inverted here; the sample has 255 = ink already.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partwise.data import holdout
from partwise.data.build import join_blocks
from partwise.data.loaders.locate import data_root, held_by
from partwise.data.loaders.mnist_writers import PARTS, check_images, check_labels, read_arrays, to_ink
from partwise.data.reading import is_there, reading, regular
from partwise.data.store import ClientStore, group_rows
from partwise.data.store_folder import Block
from partwise.types import UserError

SAMPLE = "femnist_leaf_sample.npz"
FOLDERS = ("", "data", "femnist", "femnist/data", "femnist-sample")
NUM_CLASSES = 62  # digits, then A..Z, then a..z
SHARES = (0.9, 0.1)  # of a writer's images, as in TFF's EMNIST
ROWS = ("images", "labels", "writer")
EXPECTED = f"LEAF's train/*.json and test/*.json, all_data_*.json or {SAMPLE}"
FORM = "an object with users and user_data: {writer: {x: [images of 784 numbers], y: [labels]}}"
Files = dict[str, list[Path]]


def load(
    path: str | Path | None = None, min_images: int = 50, seed: int = 0
) -> tuple[ClientStore, ClientStore]:
    """(train, test). If the files have no split, a tenth of every writer's images is for the test, drawn by `seed`.

    `path` is one of the files or a folder that has them. Without a path, PARTWISE_DATA says where to look.
    Writers with fewer than `min_images` images are left out, and of the sample those of whom it has only the test
    images. One JSON file is held in memory at a time.
    """
    files = _find(path)
    place = next(iter(files.values()))[0]
    with reading(place):
        if place.suffix == ".npz":
            parts = [_read_sample(place)]
        else:
            parts = [join_blocks(_blocks(each), info=_info(each, part)) for part, each in files.items()]
        parts = _large(parts, min_images)
    train, test = parts if len(parts) > 1 else holdout.by_example(parts[0], SHARES, seed)
    return train, test


def locate(path: str | Path | None) -> Path | None:
    """The path, if it is a file with a name of FEMNIST's, or a folder that has such files directly. Otherwise None:
    a folder with several data sets is not used."""
    if path is None:
        return None
    source = Path(path).expanduser()
    if source.is_dir():
        return source if _held(source, FOLDERS[:2]) else None
    return source if source.name == SAMPLE or source.suffix == ".json" else None


def _find(path: str | Path | None) -> Files:
    root = data_root(path, "LEAF's FEMNIST", f"pass the path of {EXPECTED}", f"give {EXPECTED}")
    if not root.is_dir():
        return {"all": [regular(root, f"give {EXPECTED}")]}
    found = _held(root, FOLDERS)
    if not found:
        raise UserError(f"{root} holds no FEMNIST: looked for {EXPECTED}, found {held_by(root)}")
    return found


def _held(root: Path, folders: Sequence[str]) -> Files | None:
    """The files of the first folder that has some, by part; `all` if they have no split."""
    for folder in (root / name for name in folders):
        if is_there(folder / SAMPLE):
            return {"all": [folder / SAMPLE]}
        parts = {part: sorted((folder / part).glob("*.json")) for part in PARTS}
        if all(parts.values()):
            return parts
        whole = sorted(folder.glob("all_data_*.json")) or sorted(folder.glob("all_data/all_data_*.json"))
        if whole:
            return {"all": whole}
    return None


def _read_sample(source: Path) -> ClientStore:
    """The writers of the sample that are complete."""
    arrays = read_arrays(source, (*ROWS, "writer_ids", "complete"), ROWS)
    images, labels, writer = (arrays[name] for name in ROWS)
    names, complete = arrays["writer_ids"], arrays["complete"]
    check_images(images, f"{source}, images")
    check_labels(labels, NUM_CLASSES, f"{source}, labels")
    check_labels(writer, len(names), f"{source}, writer")
    if complete.dtype != bool or complete.shape != names.shape or names.dtype.kind != "U":
        raise UserError(
            f"{source}: writer_ids {names.dtype} {list(names.shape)}, complete {complete.dtype} "
            f"{list(complete.shape)}; expected a name and a true or false for every writer. Get the file again"
        )
    known, times = np.unique(names, return_counts=True)
    if len(known) < len(names):
        twice = known[times > 1][0]
        raise UserError(
            f"{source}: writer_ids has {str(twice)!r} twice; expected every writer once. Get the file again"
        )
    rows = complete[writer]
    columns = {"pixels": images[rows], "label": labels[rows].astype(np.int32)}
    return group_rows(names[writer[rows]], columns, (), _info([source], "all"))


def _blocks(files: Sequence[Path]) -> Iterator[Block]:
    """A block for every writer who has images."""
    for file in files:
        for writer, given in _read_json(file).items():
            where = f"{file}, writer {writer}"
            if not isinstance(given, dict) or not {"x", "y"} <= given.keys():
                raise UserError(f"{where}: {str(given)[:40]!r}; expected {FORM}. Get the file again")
            labels = np.asarray(given["y"])
            if not labels.size and not len(given["x"]):
                continue
            check_labels(labels, NUM_CLASSES, f"{where}, y")
            pixels = to_ink(_numbers(given["x"], f"{where}, x"), f"{where}, x")
            if len(pixels) != len(labels):
                raise UserError(
                    f"{where}: {len(pixels)} images and {len(labels)} labels; expected a label for each image. "
                    f"Get the file again"
                )
            columns = {"pixels": pixels, "label": labels.astype(np.int32)}
            yield Block(np.array([writer]), np.array([len(labels)]), columns)


def _read_json(file: Path) -> dict[str, Any]:
    """`user_data` of a file."""
    with reading(file):
        told = json.loads(file.read_bytes(), object_pairs_hook=lambda pairs: _once_each(pairs, file))
        held = told.get("user_data") if isinstance(told, dict) else None
        if not isinstance(held, dict) or set(told.get("users", held)) != set(held):
            raise UserError(f"{file} is not in LEAF's form: expected {FORM} of these users. Get it again")
        for writer, said in zip(told.get("users", ()), told.get("num_samples", ()), strict=False):
            there = len(held[writer]["y"]) if isinstance(held[writer], dict) and "y" in held[writer] else said
            if there != said:
                raise UserError(
                    f"{file}, writer {writer}: num_samples is {said}, and there are {there} labels. Get it again"
                )
        return held


def _once_each(pairs: list[tuple[str, Any]], file: Path) -> dict[str, Any]:
    """The object, which must not have a name twice: JSON would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise UserError(f"{file} has {twice[:40]!r} twice in one object; expected it once. Get it again")
    return found


def _numbers(images: Any, where: str) -> np.ndarray:
    try:
        return np.asarray(images, np.float32)
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}; expected images of 784 numbers. Get the file again") from error


def _large(parts: Sequence[ClientStore], min_images: int) -> list[ClientStore]:
    """The parts, with the writers who have enough images in all parts together."""
    if len({part.client_ids.dtype.kind for part in parts}) > 1:  # all names of one part are numbers
        parts = [dataclasses.replace(part, client_ids=part.client_ids.astype(str)) for part in parts]
    writers, place = np.unique(np.concatenate([part.client_ids for part in parts]), return_inverse=True)
    images = np.bincount(place, np.concatenate([part.counts for part in parts])).astype(int)
    large = [part.take(np.isin(part.client_ids, writers[images >= min_images])) for part in parts]
    for part in large:
        if not part.num_clients:
            raise UserError(
                f"no writer of the part '{part.info['split']}' has at least {min_images} images in all, the most "
                f"of any writer is {images.max()}; lower min_images"
            )
    return large


def _info(files: Sequence[Path], part: str) -> dict[str, Any]:
    place = str(files[0] if len(files) == 1 else files[0].parent)
    return {"source": "LEAF FEMNIST", "file": place, "split": part, "classes": NUM_CLASSES}
