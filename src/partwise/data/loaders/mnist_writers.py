"""Handwriting by writer: MNIST with its NIST writers, and TensorFlow Federated's EMNIST.

Columns: `pixels` uint8 [N, 28, 28], 255 = ink and 0 = background, and `label` int32 [N]. A model divides by
255, so that ink is 1.0 on 0.0. TFF's EMNIST is stored inverted (ink 0.0 on 1.0) and is inverted here.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.data.build import join_blocks, write_store
from partwise.data.loaders import tff
from partwise.data.loaders.locate import data_root, first_of
from partwise.data.reading import check_growth, reading
from partwise.data.store import ClientStore, group_rows
from partwise.data.store_folder import Block
from partwise.types import UserError, unknown

SIZE = 28
PARTS = ("train", "test")
MNIST_FILE = "mnist_by_writer.npz"
MNIST_ARRAYS = ("images", "labels", "writer", "split")
MNIST_COUNTS = {"train": (539, 60_000), "test": (297, 10_000)}  # writers, images
EMNIST_URL = "https://storage.googleapis.com/tff-datasets-public/emnist_all.sqlite.lzma"


class MnistFiles(NamedTuple):
    """One of the two forms in which TFF distributes EMNIST. Labels are digits, then A..Z, then a..z."""

    num_classes: int
    split: str  # the start of its splits' names in SQLite
    hdf5: str  # the start of its HDF5 files' names
    counts: dict[str, tuple[int, int]]


RELEASES = {
    False: MnistFiles(62, "all", "fed_emnist", {"train": (3400, 671_585), "test": (3400, 77_483)}),
    True: MnistFiles(
        10, "digits_only", "fed_emnist_digitsonly", {"train": (3383, 341_873), "test": (3383, 40_832)}
    ),
}


def load_mnist_by_writer(path: str | Path | None = None) -> tuple[ClientStore, ClientStore]:
    """(train, test) of `mnist_by_writer.npz`; `path` is the file or a folder that has it. The two parts have
    different writers.

    Without a path, the environment variable PARTWISE_DATA says where to look.
    """
    names = [MNIST_FILE, f"mnist-by-writer/{MNIST_FILE}"]
    source = _locate(path, names, MNIST_FILE)
    with reading(source, "is it a whole .npz file? Get it again"):
        stores = _split_writers(read_arrays(source, MNIST_ARRAYS, MNIST_ARRAYS), source)
    return stores[0], stores[1]


def _split_writers(arrays: dict[str, np.ndarray], source: Path) -> list[ClientStore]:
    images, labels, writers = (arrays[name] for name in ("images", "labels", "writer"))
    splits = np.unique(arrays["split"]).tolist()
    if set(splits) != {0, 1}:
        raise UserError(f"{source}: splits {splits}; expected 0 (train) and 1 (test). Get {MNIST_FILE} again")
    check_images(images, f"{source}, images")
    check_labels(labels, 10, f"{source}, labels")
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    stores = []
    for number, part in enumerate(PARTS):
        rows = arrays["split"] == number
        columns = {"pixels": images[rows], "label": labels[rows].astype(np.int32)}
        info = {"source": "MNIST by writer", "file": str(source), "sha256": sha256, "split": part}
        counts = _counts(len(np.unique(writers[rows])), int(rows.sum()), MNIST_COUNTS[part])
        stores.append(group_rows(writers[rows], columns, (), {**info, "classes": 10, **counts}))
    return stores


def load_emnist(
    path: str | Path | None = None, only_digits: bool = False, out: str | Path | None = None
) -> tuple[ClientStore, ClientStore]:
    """(train, test) of TFF's federated EMNIST: different images of the *same* writers. They are in memory, or
    written to the new folders `train` and `test` under `out`, one writer at a time.

    `path` is `emnist_all.sqlite` (also `.lzma`), one of the older `fed_emnist_train.h5` and `_test.h5`, or a
    folder that has them. Without a path, the environment variable PARTWISE_DATA says where to look.
    """
    release = RELEASES[only_digits]
    hdf5 = [f"{release.hdf5}_{part}.h5" for part in PARTS]
    names = ["emnist_all.sqlite", "emnist_all.sqlite.lzma", hdf5[0]]
    names += [f"emnist/{name}" for name in names]
    source = _locate(path, names, f"federated EMNIST ({EMNIST_URL})")
    with reading(source), tff.unpacked(source) as file:
        if tff.is_hdf5(source):
            places = [(tff.sibling(source, part, PARTS), None) for part in PARTS]
        else:
            places = [(file, _split(tff.splits(file), release, part, source)) for part in PARTS]
        train, test = (
            _load_part(place, split, part, release, source, Path(out) / part if out else None)
            for part, (place, split) in zip(PARTS, places, strict=True)
        )
    return train, test


def _load_part(
    file: Path, split: str | None, part: str, release: MnistFiles, source: Path, out: Path | None
) -> ClientStore:
    where = source if split else file
    clients = tff.read_clients(file, split, ("pixels", "label"))
    info: dict[str, Any] = {"source": "TFF federated EMNIST", "file": str(where), "split": split or part}
    info["classes"] = release.num_classes
    blocks = _counted(_blocks(clients, release.num_classes, where), info, release.counts[part])
    return join_blocks(blocks, info=info) if out is None else write_store(out, blocks, info=info)


def _blocks(clients: Iterator[tuple[str, tff.Features]], num_classes: int, file: Path) -> Iterator[Block]:
    for client, features in clients:
        where = f"{file}, client {client}"
        labels = np.asarray(features["label"])
        check_labels(labels, num_classes, f"{where}, label")
        pixels = to_ink(features["pixels"], f"{where}, pixels")
        columns = {"pixels": pixels, "label": labels.astype(np.int32)}
        yield Block(np.array([client]), np.array([len(labels)]), columns)


def to_ink(pixels: list | np.ndarray, where: str) -> np.ndarray:
    """Floats with ink 0.0 on 1.0, [n, 784] or [n, 28, 28], to uint8 with ink 255 on 0."""
    if isinstance(pixels, list) or pixels.shape[1:] not in ((SIZE, SIZE), (SIZE * SIZE,)):
        given = "of differing shapes" if isinstance(pixels, list) else f"of shape {pixels.shape[1:]}"
        raise UserError(f"{where}: images {given}; expected 784 or 28 x 28 numbers. Is this EMNIST?")
    images = pixels.reshape(-1, SIZE, SIZE)
    outside = ~((images >= 0) & (images <= 1))  # NaN is outside too
    if outside.any():
        place = np.argwhere(outside)[0]
        raise UserError(
            f"{where}: {images[tuple(place)]} in example {place[0]}; expected numbers from 0 (ink) to 1. "
            "Download the file again or mend it"
        )
    return np.rint(255 * (1 - images)).astype(np.uint8)


def check_images(images: np.ndarray, where: str) -> None:
    """Raise `UserError` if these are no images of the right size."""
    if images.dtype != np.uint8 or images.shape[1:] != (SIZE, SIZE):
        raise UserError(
            f"{where}: {images.dtype} {list(images.shape)}; expected uint8 [N, 28, 28], 255 = ink. "
            "Download the file again"
        )


def check_labels(labels: np.ndarray, num_classes: int, where: str) -> None:
    """Raise `UserError` for labels that are no classes."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{where}: {labels.dtype} {list(labels.shape)}; expected one whole number per image")
    outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(outside):
        raise UserError(
            f"{where}: {labels[outside[0]]} in example {outside[0]}; expected 0 to {num_classes - 1}. "
            "Download the file again or mend it"
        )


def read_arrays(source: Path, names: Sequence[str], rows: Sequence[str]) -> dict[str, np.ndarray]:
    """These arrays of a .npz file. Those in `rows` are of one length."""
    with zipfile.ZipFile(source) as archive:
        for member in archive.infolist():
            check_growth(f"{source}/{member.filename}", member.file_size, member.compress_size)
    with np.load(source, allow_pickle=False) as file:
        there, arrays = list(file), {name: file[name] for name in names if name in file}
    for name in names:
        if name not in arrays:
            raise UserError(f"{source}: {unknown('array', name, there)}; give the file as it was downloaded")
    lengths = {name: len(arrays[name]) if arrays[name].ndim else "none" for name in rows}
    if len(set(lengths.values())) > 1 or "none" in lengths.values():
        raise UserError(f"{source}: arrays of lengths {lengths}; expected one length. Get the file again")
    return arrays


def _counted(blocks: Iterable[Block], info: dict[str, Any], published: tuple[int, int]) -> Iterator[Block]:
    """The blocks. After the last one, `info` says how many writers and images there were."""
    writers = images = 0
    for block in blocks:
        writers, images = writers + len(block.client_ids), images + int(block.counts.sum())
        yield block
    info |= _counts(writers, images, published)


def _counts(writers: int, images: int, published: tuple[int, int]) -> dict[str, Any]:
    return {"writers": writers, "images": images, "published_counts": (writers, images) == published}


def _split(there: list[str], release: MnistFiles, part: str, source: Path) -> str:
    """TFF's own name of the split (`all_train`), or the plain name if the file has only that."""
    for name in (f"{release.split}_{part}", part):
        if name in there:
            return name
    names = ", ".join(there) or "none"
    raise UserError(f"{source} has no split '{release.split}_{part}': it has {names}; give emnist_all.sqlite")


def _locate(path: str | Path | None, names: Sequence[str], what: str) -> Path:
    root = data_root(path, what, f"pass the path of {names[0]}", f"give the path of {what}, or its folder")
    return first_of(root, names, what)
