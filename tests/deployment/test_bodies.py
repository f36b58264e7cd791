"""Large bodies of requests: all come through, and only some are in memory at a time."""

from __future__ import annotations

import asyncio
import os

import pytest
import zstandard

from partwise.deployment.bodies import SMALL, ZSTD, Bodies, TooLargeError

LARGE, MOST = 2 * SMALL, 8 * SMALL


async def parts_of(body, pauses=0):
    for begin in range(0, len(body), 1 << 16):
        for _ in range(pauses):
            await asyncio.sleep(0)
        yield body[begin : begin + (1 << 16)]


class Work:
    """What is done with bodies, and how many bytes of them are there at a time."""

    def __init__(self, folder, room, seconds=0.002):
        self.bodies, self.seconds = Bodies(folder, room), seconds
        self.now = self.most = 0
        self.order: list[bytes] = []

    async def take(self, body, encoding="", pauses=0, inside=0):
        async with self.bodies.taken(parts_of(body, pauses), encoding, MOST) as found:
            assert found == body
            self.now += len(found) + inside
            self.most = max(self.most, self.now)
            await asyncio.sleep(self.seconds)
            self.now -= len(found) + inside
            self.order.append(found[:1])

    def all(self, *works):
        async def together():
            await asyncio.gather(*works)

        asyncio.run(together())
        return self


@pytest.mark.parametrize("room", [1, LARGE, 2 * LARGE + 1, 5 * LARGE])
def test_large_bodies_are_in_memory_as_far_as_there_is_room(tmp_path, room):
    work = Work(tmp_path, room)
    work.all(*(work.take(bytes([place]) * LARGE, pauses=place % 3) for place in range(20)))
    assert sorted(work.order) == [bytes([place]) for place in range(20)]
    assert work.most == LARGE * max(1, room // LARGE)
    assert work.now == 0
    assert os.listdir(tmp_path) == []


def test_they_have_their_turn_in_the_order_in_which_they_have_come(tmp_path):
    """A body larger than the room is not overtaken by smaller ones."""
    work = Work(tmp_path, LARGE)
    sizes = [LARGE, LARGE, 3 * LARGE, LARGE, LARGE // 2 + SMALL // 2]
    work.all(*(work.take(bytes([place]) * size) for place, size in enumerate(sizes)))
    came = [int.from_bytes(each) for each in work.order]
    assert came == sorted(came)


def test_small_bodies_do_not_wait(tmp_path):
    work = Work(tmp_path, 1, seconds=0.0)

    async def together():
        async with work.bodies.taken(parts_of(bytes(LARGE)), "", MOST):
            await asyncio.wait_for(work.take(b"small"), 60)
            await asyncio.wait_for(work.take(b""), 60)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work.take(bytes(LARGE)), 0.1)
        await asyncio.wait_for(work.take(bytes(LARGE)), 60)  # nothing is left of the one that waited

    asyncio.run(together())


def test_a_body_counts_as_it_is_when_unpacked(tmp_path):
    work = Work(tmp_path, 2 * LARGE + SMALL)
    body = zstandard.compress(bytes(LARGE))
    assert len(body) < SMALL
    work.all(*(work.take(body, ZSTD, inside=LARGE) for _ in range(10)))
    assert work.most == 2 * (LARGE + len(body))


@pytest.mark.parametrize("encoding", ["", ZSTD])
def test_a_body_that_is_too_large_is_not_read_to_its_end(tmp_path, encoding):
    read = []

    async def endless():
        while True:
            read.append(1)
            yield bytes(1 << 16)

    async def take():
        async with Bodies(tmp_path).taken(endless(), encoding, MOST):
            pass

    with pytest.raises(TooLargeError):
        asyncio.run(take())
    assert len(read) == (MOST >> 16) + 1
    assert os.listdir(tmp_path) == []


def test_work_that_fails_leaves_its_room(tmp_path):
    bodies = Bodies(tmp_path, 1)

    async def fails():
        async with bodies.taken(parts_of(bytes(LARGE)), "", MOST):
            raise ValueError("no")

    async def twice():
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await asyncio.wait_for(fails(), 60)

    asyncio.run(twice())
