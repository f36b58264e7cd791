"""A reader and damaged files: whatever the damage, it reads them or says what is wrong, and nothing else.

Run by `test_fuzz.py` in a process of its own, because a reader that crashes takes its process with it:
`python fuzz.py FOLDER COUNT`, where the folder holds `targets.json`. Prints, as JSON, what became of every target.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from partwise.checkpoint import load_arrays
from partwise.data import open_store, read_table
from partwise.data.loaders import (
    amazon_clicks,
    amazon_reviews,
    blogs,
    femnist,
    mnist_writers,
    movielens_ratings,
    movielens_users,
    sentence_table,
    sentiment140,
    sequence_clicks,
    shakespeare,
    stackexchange,
    stackoverflow,
    tff,
)
from partwise.data.text.words import read_vocabulary
from partwise.runs.client_file import Form, read_client_file
from partwise.runs.personal import load_local
from partwise.types import UserError

SECONDS, BYTES = 20, 3 << 30  # that reading one file may take
VOCABULARIES = {"item": np.array(["0", "00", "tea"])}


def read_store(path: Path) -> None:
    store = open_store(path)
    store.gather().find(store.client_ids[0])
    assert sum(np.sum(values, dtype=np.float64) is not None for values in store.columns.values())


def read_lists(path: Path) -> None:
    read_table(path, "user", ids={"past": "item", "item": "item", "kind": "kind"}, lists={"past": 2})


def with_users(path: Path) -> None:
    movielens_users.with_users(movielens_ratings.load(path), path)


def read_client(path: Path) -> None:
    names, shapes = {"item": "item", "rating": "rating"}, {"item": (), "rating": ()}
    read_client_file(path, Form(names, VOCABULARIES, shapes, "user", {}), "ann")


READERS: dict[str, Callable[[Path], Any]] = {
    "table": lambda path: read_table(path, "user", ids=["item"], order_by="rating"),
    "whole rows": lambda path: read_table(path, "user", ids=["item"], order_by="rating", missing="skip"),
    "lists": read_lists,
    "client": read_client,
    "store": read_store,
    "arrays": load_arrays,
    "local": load_local,
    "words": read_vocabulary,
    "movielens": movielens_ratings.load,
    "movielens-100k": lambda path: movielens_ratings.load(path, "100k"),
    "movielens-users": with_users,
    "amazon-clicks": lambda path: amazon_clicks.load(path, min_ratings=1),
    "sequence-clicks": lambda path: sequence_clicks.load(path, "Yelp"),
    "amazon-reviews": lambda path: list(amazon_reviews.load(path)),
    "blogs": lambda path: list(blogs.load(path)),
    "sentences": lambda path: list(sentence_table.load(path)),
    "sentiment140": lambda path: list(sentiment140.load(path)),
    "shakespeare": lambda path: list(shakespeare.load(path, min_speeches=1)),
    "stackexchange": lambda path: list(stackexchange.load(path)),
    "stackoverflow": lambda path: list(stackoverflow.load(path)),
    "tff": lambda path: list(tff.read_clients(path)),
    "mnist": mnist_writers.load_mnist_by_writer,
    "femnist": lambda path: femnist.load(path, min_images=1),
    "emnist": lambda path: mnist_writers.load_emnist(path, only_digits=True),
}


def mutations(data: bytes, count: int, seed: str) -> Iterator[bytes]:
    """Bits flipped, ends cut off, chunks deleted, doubled, moved in, blanked or made large."""
    rng = random.Random(seed)
    for _ in range(count):
        mutated = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            first = rng.randrange(len(mutated) + 1)
            length = rng.choice((1, 2, 4, 8, 50, 1000))
            match rng.randrange(8):
                case 0 | 1 | 2:
                    mutated[first : first + 1] = bytes(
                        byte ^ 1 << rng.randrange(8) for byte in mutated[first : first + 1]
                    )
                case 3:
                    del mutated[first:]
                case 4:
                    del mutated[first : first + length]
                case 5:
                    mutated[first:first] = mutated[first : first + length]
                case 6:
                    mutated[first : first + length] = bytes(len(mutated[first : first + length]))
                case 7:
                    mutated[first : first + length] = rng.choice((b"\xff" * length, rng.randbytes(length)))
        yield bytes(mutated)


def outcome(read: Callable[[Path], Any], path: Path) -> str:
    """`read`, `refused`, or what else happened."""
    signal.setitimer(
        signal.ITIMER_PROF, SECONDS
    )  # of computing; then the process ends, even within a library
    try:
        read(path)
    except UserError as error:
        return "refused" if str(path) in str(error) else f"a message without the file's name: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "read"


def run(target: dict[str, str], count: int, folder: Path, seed: str) -> dict[str, Any]:
    """The outcomes of one target; `path` is what is read, `file` is what is damaged."""
    path, file = Path(target["path"]), Path(target["file"])
    whole, read = file.read_bytes(), READERS[target["reader"]]
    told = {"read": 0, "refused": 0, "failures": []}
    assert outcome(read, path) == "read", f"the whole file is refused: {target} {outcome(read, path)}"
    for number, mutated in enumerate(mutations(whole, count, f"{seed}{target['name']}")):
        file.write_bytes(mutated)
        (folder / "last.json").write_text(json.dumps([target["name"], number]))  # in case of a crash
        found = outcome(read, path)
        if found in told:
            told[found] += 1
        else:
            told["failures"].append([number, found[:500]])
    file.write_bytes(whole)
    print(target["name"], told, file=sys.stderr, flush=True)
    return told


def main(folder: Path, count: int, seed: str = "") -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    tempfile.tempdir = str(folder)
    targets = json.loads((folder / "targets.json").read_text())
    print(json.dumps({target["name"]: run(target, count, folder, seed) for target in targets}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
