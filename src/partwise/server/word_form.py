"""A client's contribution as words of 32 bits, for sums of which nobody sees the parts.

The *dense* words are those of shared leaves, then how many clients there are and their loss. Every key space has a
table of words, a row for each of the client's keys. The client's weight is not among them: all clients weigh the
same (`server.private_sum`), and it would tell of a round more than the noisy number of clients does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.metrics import Sums
from partwise.model.partition import Partition
from partwise.privacy.sum_words import SumWords
from partwise.server.total import Aggregator, Contribution, Total
from partwise.types import UserError

NUM_SUMS = 2  # dense words after those of leaves: the number of clients, and their loss


class WordForm:
    """How the contributions of an algorithm are laid out in words."""

    def __init__(self, aggregator: Aggregator, partition: Partition):
        zero = jax.eval_shape(aggregator.zero, jax.ShapeDtypeStruct((), jnp.float32))
        if zero.dtype != jnp.uint32:
            raise UserError(
                "sums that nobody sees the parts of are of whole numbers: set privacy.sums, or wrap the aggregator "
                "in server.encoding.fixed_point"
            )
        trained, shapes = partition.trained_paths, partition.server_shapes
        self._spaces = {
            space: tuple(path for path in paths if path in trained)
            for space, paths in partition.spaces.items()
        }
        keyed = partition.of("keyed")
        self._shared = [path for path in shapes if path in trained and path not in keyed]
        self._shapes = {path: shapes[path].shape for path in shapes}
        self.num_keys = {space: partition.num_keys(space) for space in self._spaces}
        self.num_words = {space: sum(map(self._width, paths)) for space, paths in self._spaces.items()}
        self.num_dense = sum(shapes[path].size for path in self._shared) + NUM_SUMS

    def of(self, sent: Contribution) -> SumWords:
        """The words of a client's contribution."""
        flat = [np.asarray(sent.update[path]).reshape(-1) for path in self._shared]
        sums = np.array([sent.clients, sent.loss.value], np.uint32)
        tables = {
            space: np.concatenate([_rows(sent.update[path]) for path in paths], axis=1)
            for space, paths in self._spaces.items()
        }
        return SumWords(np.concatenate([*flat, sums]), tables)

    def total(self, words: SumWords) -> Total:
        """The sum of words as the total of a round, before it is revealed."""
        update: dict[str, Any] = {}
        for paths, rows in ((self._shared, words.dense[None, :-NUM_SUMS]), *self._tables(words)):
            whole = paths is self._shared
            ends = np.cumsum(
                [int(np.prod(self._shapes[path])) if whole else self._width(path) for path in paths]
            )
            for path, part in (
                zip(paths, np.split(rows, ends[:-1], axis=1), strict=True) if len(paths) else ()
            ):
                update[path] = jnp.asarray(part.reshape(self._shapes[path]))
        clients, loss = (jnp.asarray(each) for each in words.dense[-NUM_SUMS:])
        none = jnp.zeros((), jnp.uint32)
        return Total(update, {}, none, clients, Sums(loss, none))

    def _tables(self, words: SumWords) -> list[tuple[tuple[str, ...], np.ndarray]]:
        return [(paths, words.tables[space]) for space, paths in self._spaces.items()]

    def _width(self, path: str) -> int:
        return int(np.prod(self._shapes[path][1:], dtype=int))


def _rows(leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf.reshape(len(leaf), int(np.prod(leaf.shape[1:], dtype=int)))
