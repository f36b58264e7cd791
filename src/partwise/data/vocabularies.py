"""The ids behind a store's keys, with what a client's own table must be like to be read as the store's was."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

CLIENT_COLUMN = "client_column"  # in a store's `info`: what its table called the column of clients


class Vocabularies(dict[str, np.ndarray]):
    """The source id of every key, by column.

    client: the name of the source's column of clients, if it is known
    shapes: of the value that a row has in each column, as far as they are known
    """

    def __init__(
        self,
        ids: Mapping[str, np.ndarray],
        client: str | None = None,
        columns: Mapping[str, np.ndarray] | None = None,
    ):
        super().__init__(ids)
        self.client = client
        self.shapes = {name: values.shape[1:] for name, values in (columns or {}).items()}
