"""Versions of the model as files for devices, written as `serving.way` says, and deleted when nobody needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from partwise.data.heat import Heat
from partwise.deployment.files import FilePlace
from partwise.deployment.manifest import files_of
from partwise.deployment.pages import KeyOrder, PagedVersion, write_order, write_pages, write_whole
from partwise.model.partition import Partition
from partwise.server.messages import About


class WholePublisher:
    """Every version is one file (broadcast)."""

    def __init__(self, place: FilePlace, partition: Partition, run: str):
        self._place, self._partition, self._run = place, partition, run

    def publish(
        self, number: int, params: Mapping[str, np.ndarray], rng: np.ndarray, public: Mapping[str, Any]
    ) -> str:
        """As `hub.Publisher.publish`."""
        about = About(self._run, number, model=self._partition.digest)
        return write_whole(self._place, self._partition, params, rng, about, public)

    def files(self) -> set[str]:
        """As `hub.Publisher.files`."""
        return self._place.names()

    def keep(self, names: Iterable[str], among: Iterable[str]) -> None:
        """As `hub.Publisher.keep`."""
        self._place.delete(set(among) - set(names))


class PagePublisher:
    """Every version is a manifest with pages (pre-generated).

    Args:
        place: Where the files go.
        partition: The roles of the model's leaves.
        run: The run's name.
        page_rows: Rows in a page.
        heats: How many clients hold each key, by space: the hottest keys come first. A space without heat is in
            the order of its keys.
    """

    def __init__(
        self,
        place: FilePlace,
        partition: Partition,
        run: str,
        page_rows: int,
        heats: Mapping[str, Heat],
    ):
        self._place, self._partition, self._run = place, partition, run
        self._last: tuple[PagedVersion, Mapping[str, np.ndarray]] | None = None
        self._orders = {
            space: _order(place, heats.get(space), partition.num_keys(space), page_rows)
            for space in partition.spaces
        }

    def publish(
        self, number: int, params: Mapping[str, np.ndarray], rng: np.ndarray, public: Mapping[str, Any]
    ) -> str:
        """As `hub.Publisher.publish`. Pages that did not change are not written again."""
        about = About(self._run, number, model=self._partition.digest)
        before, changed = None, None
        if self._last is not None:
            before, changed = self._last[0], self._changed(self._last[1], params)
        given = (self._place, self._partition, params, rng, about, self._orders, before, changed)
        version = write_pages(*given, public=public)
        self._last = version, params
        return version.name

    def files(self) -> set[str]:
        """As `hub.Publisher.files`."""
        return self._place.names()

    def keep(self, names: Iterable[str], among: Iterable[str]) -> None:
        """As `hub.Publisher.keep`."""
        needed = set[str]().union(*(files_of(self._partition, name, self._place.read) for name in names))
        self._place.delete(set(among) - needed)

    def _changed(
        self, before: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The keys whose rows are not what they were."""
        found = {}
        for space, paths in self._partition.spaces.items():
            differs = np.zeros(self._partition.num_keys(space), bool)
            for path in paths:
                rows = (now[path] != before[path]).reshape(len(differs), -1)
                differs |= rows.any(axis=1)
            found[space] = np.flatnonzero(differs)
        return found


def _order(place: FilePlace, heat: Heat | None, num_keys: int, page_rows: int) -> KeyOrder:
    counts = np.zeros(num_keys) if heat is None else heat.counts
    return write_order(place, np.argsort(-counts, kind="stable"), min(page_rows, num_keys))
