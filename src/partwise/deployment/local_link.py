"""A device's way to a hub in the same process: for tests, and for devices that are simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from partwise.deployment.coordinator import Wait, Work
from partwise.deployment.hub import Hub
from partwise.deployment.link import Offer
from partwise.server.round import Accepted, Refused
from partwise.types import UserError


class LocalLink:
    """A link to a hub in the same process."""

    def __init__(self, hub: Hub, device: str, offered: Offer):
        self._hub, self._device, self._offered = hub, device, offered

    def offer(self) -> Offer:
        """As `Link.offer`."""
        return self._offered

    def join(self, clients: Iterable[str]) -> None:
        """As `Link.join`."""
        refused = self._hub.join(self._device, clients)
        if refused:
            raise UserError(refused.what)

    def poll(self, ready: bool, most: int) -> Work | Wait:
        """As `Link.poll`."""
        return self._hub.poll(self._device, ready, most)

    def slices(self, task: str, keys: Mapping[str, np.ndarray]) -> bytes | Refused:
        """As `Link.slices`."""
        return self._hub.slices(self._device, task, keys)

    def report(self, report: bytes) -> Accepted | Refused:
        """As `Link.report`."""
        return self._hub.report(self._device, report)
