"""MovieLens with eight devices of many users each, as processes of their own: it learns like the simulation, what
travels is what the records say, and nothing of a user's ratings or vector is in it."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections import Counter

import numpy as np
import pytest

from partwise.checkpoint import load_arrays
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.runs.train import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set"),
]

DEVICES, ROUNDS, COHORT, LARGEST = 8, 4, 100, 1 << 26


# It learns


def test_sites_learn_like_the_simulation(fleet):
    """Cohorts are drawn from the clients by name. Simulated in this order, one seed has the same cohorts."""
    rounds = {"rounds": 60, "simulation.evaluate_every": 0}
    run = fleet("movielens", rounds | {"deploy.reports": "sum"})
    server = run.serve("--until-end")
    run.finish(run.join(server.url, DEVICES))
    assert server.popen.wait(300) == 0
    deployed = evaluate_run(run.folder / "run")["rmse"]
    task, _ = resolve("movielens", None, {})
    task = task._replace(train=task.train.take(np.argsort(task.train.client_ids.astype(str))))
    same, *others = (train(task, changes=rounds | {"seed": seed}).test["rmse"] for seed in range(3))
    print(f"test RMSE: deployed {deployed:.5f}; simulated {same:.5f}, with other seeds {others}")
    spread = max(same, *others) - min(same, *others)
    assert abs(deployed - same) < 0.1 * spread
    assert deployed < 0.93


# What is stated (docs/deploy.md, What travels), in bytes

HTTP_UP = {"run": 350, "join": 390, "poll": 370, "slices": 415, "reports": 390}
HTTP_DOWN = {"run": 135, "join": 110, "poll": 110, "slices": 135, "reports": 110}
SAID_UP = {"poll": 120}  # JSON
SAID_DOWN = {"poll": 30, "reports": 30}
TASK = 260  # in the answer to a poll
MESSAGE_UP = {"slices": 104, "reports": 650}  # headers of safetensors: keys, report
MESSAGE_DOWN = {"slices": 620}


def stated(run, records, counts):
    """Bytes up and down, as records and headers state them, by what they are."""
    times = lambda sizes: sum(counts[kind] * size for kind, size in sizes.items())
    names = len(str(run.prepared.store.client_ids.astype(str).tolist()))
    offer = DEVICES * 25_700  # vocabulary and settings of this run
    up = {"records": sum(each["bytes_up"] for each in records), "messages": times(MESSAGE_UP)}
    down = {"records": sum(each["bytes_down"] for each in records), "messages": times(MESSAGE_DOWN)}
    up |= {"HTTP": times(HTTP_UP), "polls": times(SAID_UP), "once": names}
    down |= {"HTTP": times(HTTP_DOWN), "polls": times(SAID_DOWN) + TASK * counts["reports"], "once": offer}
    return up, down


def check_bytes(run, tap, records):
    exchanges = tap.exchanges()
    counts = Counter(kind for kind, _, _ in exchanges)
    assert counts["slices"] == counts["reports"] == ROUNDS * COHORT
    for way, said, place, raw in zip(
        ("up", "down"), stated(run, records, counts), (1, 2), (tap.up, tap.down), strict=True
    ):
        travelled = sum(map(len, raw))
        unpacked = sum(len(each[place].head) + len(each[place].content) for each in exchanges)
        told = ", ".join(f"{name} {size:,}" for name, size in said.items())
        print(
            f"bytes {way}: {told}; stated {sum(said.values()):,}, at the socket {unpacked:,} unpacked, ratio "
            f"{unpacked / sum(said.values()):.4f}; {travelled:,} as packed by zstd; {dict(counts)}"
        )
        assert 0.95 < unpacked / sum(said.values()) < 1.05
        assert 0.8 * unpacked < travelled < unpacked


# What must not travel

PLANTED = np.float32(0.1415927)  # added to the ratings of all clients of one device


def windows(values, kind=np.float32) -> set[bytes]:
    """All runs of 8 bytes of an array's numbers, without those that have a zero."""
    values = np.asarray(values, kind).ravel()
    size = 8 // values.itemsize
    runs = np.lib.stride_tricks.sliding_window_view(values, size) if len(values) >= size else values[:0]
    return {run.tobytes() for run in runs if run.all()}


def in_bytes(patterns: set[bytes], data: bytes) -> set[bytes]:
    """Those of these patterns of 8 bytes that are somewhere in the data."""
    wanted, found = np.frombuffer(b"".join(sorted(patterns)), np.uint64), set()
    for start in range(8):
        here = np.frombuffer(data, np.uint64, count=(len(data) - start) // 8, offset=start)
        found |= {each.tobytes() for each in np.unique(here[np.isin(here, wanted)])}
    return found


def traces(values) -> set[bytes]:
    """Patterns of 8 bytes that show numbers."""
    wide = np.asarray(values, np.float64)
    return windows(values) | windows(values, np.float16) | windows(wide) | windows(wide.astype(">f8"), ">f8")


def planted(store, places):
    """A store in which these clients have ratings that nobody else has."""
    ratings = store.columns["rating"].copy()
    for place in places:
        ratings[store.starts[place] : store.starts[place] + store.counts[place]] += PLANTED
    return dataclasses.replace(store, columns={**store.columns, "rating": ratings})


def rated(run, store):
    """Traces of ratings, as they are and as the model sees them."""
    options = Folder(run.folder / "run").model_options()
    each = [store.examples(place)["rating"] for place in range(store.num_clients)]
    seen = [(ratings - options["center"]) / options["spread"] for ratings in each]
    return set().union(*map(traces, (*each, *seen)))


def local_of(device):
    """Traces of the local parts that a device has for its clients."""
    arrays = [load_arrays(path)[0] for path in (device.place / "own" / "clients").glob("*.local")]
    assert len(arrays) > ROUNDS
    return set().union(*(traces(part["user"]) for part in arrays))


def content_of(folder) -> bytes:
    """Everything in the files of a folder."""
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def check_nothing_local(run, tap, devices, share):
    """Neither in the traffic nor in what the server has written is anything of ratings or local parts."""
    packed = b"\n".join(map(bytes, (*tap.up, *tap.down)))
    contents = [message.content for _, *pair in tap.exchanges() for message in pair]
    traffic = b"\n".join([packed, *contents])
    files = content_of(run.folder / "run") + b"".join(
        log.read_bytes() for log in run.folder.glob("serve*.log")
    )
    secret = rated(run, share), set().union(*map(local_of, devices))
    texts = [b"3.14159", struct.pack("<f", 3.1415927), struct.pack(">f", 3.1415927)]
    print(
        f"{len(traffic):,} bytes of traffic and {len(files):,} of files, {sum(map(len, secret)):,} patterns"
    )
    for data in (traffic, files):
        assert [in_bytes(patterns, data) for patterns in secret] == [set(), set()]
        assert not [text for text in texts if text in data]
    # The search finds what is there: on the devices what is secret, elsewhere the rows of the model.
    own = content_of(devices[0].place)
    assert texts[1] in own
    assert in_bytes(windows(share.examples(0)["rating"]), own) == windows(share.examples(0)["rating"])
    assert len(in_bytes(local_of(devices[0]), own)) > ROUNDS * (10 - 1)
    for version, data in ((1, traffic), (ROUNDS, files)):
        rows = windows(run.hub().state(version).params["item"][:100])
        assert len(in_bytes(rows, data)) > 0.3 * len(rows)
    names = share.client_ids.astype(str).tolist()
    assert all(f'"{name}"'.encode() in traffic for name in names)


def test_what_travels(fleet, wait_until, tap):
    """Without TLS, so that a tap can read it. The model is the plain backend's, bit for bit, and so are the
    records' bytes."""
    run = fleet("movielens", {"rounds": ROUNDS, "cohort.size": COHORT})
    first = np.array_split(np.arange(run.prepared.store.num_clients), DEVICES)[0]
    run.prepared = run.prepared._replace(store=planted(run.prepared.store, first))
    server = run.start("serve", "--out", run.folder / "run", "--port", "0", "--until-end")
    wait_until(lambda: server.told("http"))
    wire = tap(server.told("http")[0])
    devices = run.join(wire.url, DEVICES)
    run.finish(devices)
    assert server.popen.wait(300) == 0
    check_bytes(run, wire, run.check_plain())
    check_nothing_local(run, wire, devices, run.prepared.store.gather(first))
