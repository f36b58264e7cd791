"""A contribution as one line of words, which a client sends under masks that cancel in the sum over all clients
(`privacy.masked_client`).

The line has the dense words (`server.word_form`), and then for every key space all rows of its table, zeros where
the client has no key: which keys it has is hidden as well. A report is a `report` like any other
(`server.messages`), with one array:

    #masked    uint8    the letter of stage `mask` (`privacy.masked_letters`): a stamp, and the masked line

Every report of a run has the same size.

If clients add the noise themselves (`privacy.skellam`), it is in every word of the line before it is masked. The
server adds the shares of those who did not come. So the noise of a sum does not tell how many came, and whoever
sees the model is promised what the whole noise promises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax
import numpy as np

from partwise.privacy.aes import framed
from partwise.privacy.masked_cohort import opened_vector
from partwise.privacy.masked_letters import STAMP_BYTES
from partwise.privacy.secret_noise import Random
from partwise.privacy.skellam import NoiseShare, skellam_words
from partwise.privacy.sum_words import SumWords
from partwise.server.messages import (
    LARGEST_HEADER,
    About,
    about_of,
    check_arrays,
    open_message,
    write_message,
)
from partwise.server.total import Contribution
from partwise.server.word_form import NUM_SUMS, WordForm
from partwise.types import UserError

MASKED = "#masked"


def masked_context(run: str, version: int) -> bytes:
    """What the letters of a round belong to. Its attempts differ by the names of tasks."""
    return framed(run.encode(), str(version).encode())


class LineForm:
    """How words are laid out in a line."""

    def __init__(self, words: WordForm):
        self._shapes = {space: (words.num_keys[space], words.num_words[space]) for space in words.num_keys}
        self._num_dense = words.num_dense
        self.num_words = self._num_dense + sum(keys * width for keys, width in self._shapes.values())

    def line(self, mine: SumWords, keys: Mapping[str, np.ndarray]) -> np.ndarray:
        """The line of a client that has these keys."""
        parts = [mine.dense]
        for space, shape in self._shapes.items():
            table = np.zeros(shape, np.uint32)
            table[keys[space]] = mine.tables[space]
            parts.append(table.reshape(-1))
        return np.concatenate(parts)

    def words(self, line: np.ndarray) -> SumWords:
        """The words of a sum of lines."""
        tables, begin = {}, self._num_dense
        for space, (keys, width) in self._shapes.items():
            tables[space] = line[begin : begin + keys * width].reshape(keys, width)
            begin += keys * width
        return SumWords(line[: self._num_dense], tables)

    def noise(self, share: NoiseShare, shares: int, random: Random = os.urandom) -> np.ndarray:
        """So many shares of the noise of a sum, as a line."""
        line = skellam_words(self.num_words, shares * share.update, random)
        numbers = skellam_words(NUM_SUMS, shares * share.numbers, random)
        line[self._num_dense - NUM_SUMS : self._num_dense] = numbers
        return line


class MaskedForm:
    """The form of such reports, for a server."""

    def __init__(self, words: WordForm):
        self.lines = LineForm(words)
        self._letter = STAMP_BYTES + 4 * self.lines.num_words
        self.largest = LARGEST_HEADER + self._letter

    def read(self, report: bytes, task: str) -> bytes:
        """The letter in a report of a task.

        Raises:
            UserError: It is not the letter of this task.
        """
        if len(report) > self.largest:
            raise UserError(
                f"a report of {len(report):,} bytes is too large: here it has {self.largest:,} at most"
            )
        arrays, header = open_message("report", report)
        check_arrays("report", arrays, {MASKED: jax.ShapeDtypeStruct((self._letter,), np.uint8)})
        here, letter = about_of(header), arrays[MASKED].tobytes()
        opened_vector(masked_context(here.run, here.version), task, letter, self.lines.num_words)
        return letter


class MaskingForm:
    """The same on a device. `share` is the noise that a client adds, if it does."""

    def __init__(self, words: WordForm, share: NoiseShare | None = None):
        self._words, self._lines, self._share = words, LineForm(words), share

    def write(self, belongs: About, sent: Contribution, keys: Mapping[str, np.ndarray]) -> bytes:
        """A contribution as the bytes of its line, which stay on the device until they are masked."""
        line = self._lines.line(self._words.of(sent), keys)
        if self._share:
            line += self._lines.noise(self._share, 1)
        return line.tobytes()

    def report(self, belongs: About, letter: bytes) -> bytes:
        """The report with a masked line."""
        arrays = {MASKED: np.frombuffer(letter, np.uint8)}
        return write_message("report", belongs, arrays, {"valid": True})
