"""Generated handwriting: classes are strokes, and every writer has a style.

An image has its class's strokes, with the writer's slant, shift and pressure. Then it is shifted by at most a
pixel, and its ink is made uneven. A share `confusion` of all images is drawn as the class that looks alike (0
and 1, 2 and 3, ...). So a model that does not know the writer's habits has an accuracy of at most 1 -
confusion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from partwise.data.build import join_blocks, write_store
from partwise.data.generated.streams import check_numbers, cut_block, draw_each, log_normal_counts, stream
from partwise.data.ragged import owners
from partwise.data.store import ClientStore
from partwise.data.store_folder import Block
from partwise.types import UserError

SIZE, JITTER, MARGIN = (
    28,
    1,
    10,
)  # size of an image; how far it is shifted; the margin around strokes for a writer's style
BLOCK_CLIENTS = 64  # writers that share one random stream
CLASSES, IMAGES = 10, 11  # what a random stream is for
STROKES, CORNERS, POINTS, PEN = 2, 4, 40, 1.2  # Bezier strokes of a class, and the pen's radius in pixels
SLANT, SHIFT, PRESSURE = 0.25, 1.5, 0.35  # spreads of writers; the least pressure is 1 - PRESSURE


@dataclasses.dataclass(frozen=True)
class Writers:
    """The arguments of `generate_writers`."""

    num_clients: int
    median: float
    num_classes: int
    sigma: float
    min_examples: int
    max_examples: int
    concentration: float
    confusion: float
    seed: int

    def __post_init__(self):
        positive = {"num_clients", "median", "num_classes", "min_examples", "max_examples"}
        check_numbers(dataclasses.asdict(self), positive)
        if not self.min_examples <= self.median <= self.max_examples:
            raise UserError(
                f"median is {self.median}: give at least min_examples ({self.min_examples}) "
                f"and at most max_examples ({self.max_examples})"
            )
        if self.concentration == 0 or self.confusion > 0.5:
            raise UserError(
                f"concentration is {self.concentration} and confusion {self.confusion}: "
                "give a concentration above 0 and a confusion from 0 to 0.5"
            )


def generate_writers(
    num_clients: int = 3400,
    median: float = 180,
    num_classes: int = 62,
    seed: int = 0,
    *,
    sigma: float = 0.45,
    min_examples: int = 20,
    max_examples: int = 600,
    concentration: float = 1.0,
    confusion: float = 0.1,
    out: str | Path | None = None,
) -> ClientStore:
    """Generate writers in memory or, with `out`, into a folder on disk.

    Args:
        num_clients: The number of writers.
        median: The median number of images per writer.
        num_classes: The number of different characters.
        seed: The seed of everything that is drawn.
        sigma: The spread of the logarithm of the images per writer.
        min_examples: The smallest number of images of a writer.
        max_examples: The largest number of images of a writer.
        concentration: How evenly a writer uses the classes (of a Dirichlet distribution; small means skewed).
        confusion: The share of images that are drawn as the class that looks alike.
        out: A new folder for the store; None for memory.

    Returns:
        A store with the columns `pixels` uint8 [N, 28, 28] (255 = ink on 0) and `label` int32 [N]. A writer's
            images are in random order.
    """
    arguments = Writers(
        num_clients, median, num_classes, sigma, min_examples, max_examples, concentration, confusion, seed
    )
    info = {
        "source": "generated writers",
        "classes": num_classes,
        "arguments": dataclasses.asdict(arguments),
    }
    blocks = _blocks(arguments)
    return join_blocks(blocks, info=info) if out is None else write_store(out, blocks, info=info)


def _blocks(arguments: Writers) -> Iterator[Block]:
    strokes = _strokes(arguments)
    for block in range(-(-arguments.num_clients // BLOCK_CLIENTS)):
        rng = stream(arguments.seed, IMAGES, block)
        limits = (arguments.min_examples, arguments.max_examples)
        counts = log_normal_counts(rng, BLOCK_CLIENTS, arguments.median, arguments.sigma, limits)
        habits = rng.gamma(arguments.concentration, size=(BLOCK_CLIENTS, arguments.num_classes)) + 1e-12
        writer = owners(counts)
        label = draw_each(rng, habits, writer)
        drawn = np.where(rng.random(len(label)) < arguments.confusion, _look_alike(label, arguments), label)
        pixels = _images(rng, _hands(rng, strokes), writer, drawn)
        yield cut_block(
            block, counts, {"pixels": pixels, "label": label.astype(np.int32)}, arguments.num_clients
        )


def _look_alike(label: np.ndarray, arguments: Writers) -> np.ndarray:
    return np.minimum(label ^ 1, arguments.num_classes - 1)


def _strokes(arguments: Writers) -> np.ndarray:
    """The ink of every class, from 0 to 1 with a margin around it, [K, P, P] float32."""
    rng = stream(arguments.seed, CLASSES)
    corners = rng.uniform(4, SIZE - 5, (arguments.num_classes, STROKES, CORNERS, 2)) + MARGIN
    time = np.linspace(0, 1, POINTS)[:, None]
    bezier = np.concatenate(
        [(1 - time) ** 3, 3 * time * (1 - time) ** 2, 3 * time**2 * (1 - time), time**3], axis=1
    )
    points = np.einsum("tc,ksca->ksta", bezier, corners).reshape(arguments.num_classes, -1, 1, 2)
    grid = np.arange(SIZE + 2 * MARGIN, dtype=float)
    near = np.exp(-((grid[:, None] - points) ** 2) / (2 * PEN**2))  # [K, points, P, (row, column)]
    ink = np.max(near[:, :, :, None, 0] * near[:, :, None, :, 1], axis=1)
    return ink.astype(np.float32)


def _hands(rng: np.random.Generator, strokes: np.ndarray) -> np.ndarray:
    """Every class in the style of every writer of a block, [K, W, 30, 30] uint8, with room for the jitter."""
    slant = SLANT * rng.standard_normal((BLOCK_CLIENTS, 1, 1))
    right, down = np.clip(SHIFT * rng.standard_normal((2, BLOCK_CLIENTS, 1, 1)), -3, 3)
    pressure = 255 * (1 - PRESSURE * rng.random((BLOCK_CLIENTS, 1, 1)))
    place = np.arange(SIZE + 2 * JITTER)
    middle = (len(place) - 1) / 2
    row = place[:, None] + np.rint(down).astype(int)
    lean = np.clip(slant * (place[:, None] - middle), 4 - MARGIN, MARGIN - 5)
    column = place + right + lean  # [W, 30, 30], between two columns of the source
    left = np.floor(column).astype(int)
    share = (column - left).astype(np.float32)
    side = strokes.shape[-1]
    source = (row + MARGIN - JITTER) * side + left + MARGIN - JITTER
    flat = strokes.reshape(len(strokes), -1)
    ink = (1 - share) * flat[:, source] + share * flat[:, source + 1]
    return (ink * pressure.astype(np.float32)).astype(np.uint8)


def _images(rng: np.random.Generator, hands: np.ndarray, writer: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """One image per row: a window of the writer's version of the class, with up to half of each pixel's ink
    missing."""
    windows = np.lib.stride_tricks.sliding_window_view(hands, (SIZE, SIZE), axis=(2, 3))
    down, right = rng.integers(0, 2 * JITTER + 1, (2, len(drawn)))
    clean = windows[drawn, writer, down, right]
    missing = np.frombuffer(rng.bytes(clean.size), np.uint8).reshape(clean.shape)
    return clean - (np.multiply(clean, missing, dtype=np.uint16) >> 9).astype(np.uint8)
