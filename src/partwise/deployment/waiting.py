"""Devices whose polls wait for work, and how many requests each may make."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Container

REMEMBERED = 100_000  # devices whose requests are counted


class Waiting:
    """Polls that are answered when there is work."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self.news = asyncio.Event()  # something happened that may end a round

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, device: str) -> asyncio.Future[None]:
        """A device begins to wait. It does so before it looks for work, so that it misses none."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(device, set()).add(future)
        return future

    def end(self, device: str, future: asyncio.Future[None]) -> None:
        """It waits no longer."""
        others = self._waiting.get(device, set())
        others.discard(future)
        if not others:
            self._waiting.pop(device, None)

    def wake(self, devices: Container[str] | None = None) -> None:
        """There is something for these devices, or for all."""
        for device, futures in self._waiting.items():
            if devices is None or device in devices:
                for future in futures:
                    if not future.done():
                        future.set_result(None)


class Allowance:
    """How many requests each device may still make: so many a minute, and as many at once."""

    def __init__(self, per_minute: int):
        self._per_minute = per_minute
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # device -> (requests, as of when)

    def take(self, device: str, now: float) -> bool:
        """Whether a device may make a request now."""
        left, then = self._left.pop(device, (float(self._per_minute), now))
        left = min(self._per_minute, left + max(0.0, now - then) * self._per_minute / 60)
        allowed = left >= 1
        self._left[device] = (left - 1 if allowed else left, now)
        if len(self._left) > REMEMBERED:
            self._left.popitem(last=False)
        return allowed
