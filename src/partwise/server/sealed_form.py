"""A report of which the server that gets it can read nothing: the message of `privacy.two_servers`.

It is a `report` like any other (`server.messages`), with other arrays:

    #dense          uint32    the dense words, under a mask
    #write:SPACE    uint8     the public part of the write to a key space
    #roots:SPACE    uint8     what only the first server gets of it
    #sealed         uint8     what only the helper can open

Every report of a run has the same size, also that of a client without keys or with nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from partwise.privacy.sparse_sum import write_sizes
from partwise.privacy.two_servers import Agreement, Parts, make_parts, sealed_size
from partwise.server.messages import LARGEST_HEADER, About, Shapes, check_arrays, open_message, write_message
from partwise.server.total import Contribution
from partwise.server.word_form import WordForm
from partwise.types import UserError

DENSE, SEALED, WRITE, ROOTS = "#dense", "#sealed", "#write:", "#roots:"


class SealedForm:
    """The form of such reports."""

    def __init__(self, agreement: Agreement):
        self.agreement, self.shapes = agreement, sealed_shapes(agreement)
        self.largest = LARGEST_HEADER + sum(each.size * each.dtype.itemsize for each in self.shapes.values())

    def read(self, report: bytes, task: str) -> Parts:
        """Read a report of a task.

        Raises:
            UserError: The arrays are not those that such a report has.
        """
        if len(report) > self.largest:
            raise UserError(
                f"a report of {len(report):,} bytes is too large: here it has {self.largest:,} at most"
            )
        arrays, _ = open_message("report", report)
        check_arrays("report", arrays, self.shapes)
        taken = lambda mark: {space: arrays[mark + space].tobytes() for space in self.agreement.tables}
        return Parts(task, arrays[DENSE].copy(), taken(WRITE), taken(ROOTS), arrays[SEALED].tobytes())


class SealingForm:
    """The same on a device, which writes them. `helper_key` is the helper's public key."""

    def __init__(self, agreement: Agreement, words: WordForm, helper_key: bytes):
        self._agreement, self._words, self._helper_key = agreement, words, helper_key

    def write(self, belongs: About, sent: Contribution, keys: Mapping[str, np.ndarray]) -> bytes:
        """Write a contribution as bytes."""
        mine = self._words.of(sent)
        parts = make_parts(self._agreement, self._helper_key, belongs.version, belongs.task, mine, keys)
        arrays = {DENSE: parts.masked, SEALED: _bytes(parts.sealed)}
        for space in self._agreement.tables:
            arrays[WRITE + space], arrays[ROOTS + space] = (
                _bytes(parts.writes[space]),
                _bytes(parts.roots[space]),
            )
        return write_message("report", belongs, arrays, {"valid": True})


def sealed_shapes(agreement: Agreement) -> Shapes:
    """The names, shapes and types of the arrays of a report."""
    shape = lambda size, dtype: jax.ShapeDtypeStruct((size,), dtype)
    shapes = {
        DENSE: shape(agreement.num_dense, np.uint32),
        SEALED: shape(sealed_size(agreement), np.uint8),
    }
    for space, form in agreement.tables.items():
        sizes = write_sizes(agreement.layout(space), form.num_words)
        shapes[WRITE + space], shapes[ROOTS + space] = (
            shape(sizes.public, np.uint8),
            shape(sizes.roots, np.uint8),
        )
    return shapes


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
