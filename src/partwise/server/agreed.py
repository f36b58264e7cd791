"""What the clients and both servers of a run have in common: it follows from the algorithm alone."""

from __future__ import annotations

from collections.abc import Mapping

from partwise.model.partition import Partition
from partwise.privacy.two_servers import Agreement, TableForm
from partwise.selection.choose import Choice
from partwise.selection.serving import most_keys
from partwise.server.private_slices import row_bytes
from partwise.server.total import Aggregator
from partwise.server.word_form import NUM_SUMS, WordForm


def agreement_of(
    aggregator: Aggregator, partition: Partition, choices: Mapping[str, Choice], run: str
) -> Agreement:
    """The agreement of a run, without the noise."""
    words, most = WordForm(aggregator, partition), most_keys(partition, choices)
    tables = {
        space: TableForm(
            partition.num_keys(space), most[space], words.num_words[space], row_bytes(partition, space)
        )
        for space in partition.spaces
    }
    return Agreement(run, words.num_dense, NUM_SUMS, tables)
