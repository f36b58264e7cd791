"""What the tests of the core share: two devices, small stores and models, and a client made by hand."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import jax

# Before JAX starts its backend, so that one device can be compared with two on any machine.
jax.config.update("jax_num_cpu_devices", 2)

# Many tests make the same program anew; within one session, with all its processes, it need be compiled only once.
# (A program's key has the folder's name in it, so it must be one folder for all.)
if "PYTEST_XDIST_WORKER" in os.environ:
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"]
else:
    _kept = tempfile.TemporaryDirectory(prefix="partwise-tests-")
    programs = _kept.name
jax.config.update("jax_compilation_cache_dir", programs)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
os.environ |= {  # for the processes that tests start, and the workers of this session
    "JAX_COMPILATION_CACHE_DIR": programs,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def pytest_configure(config) -> None:
    """Most of the time of fast tests would go into compiling, so they do without most optimizations, as do the
    processes that they start. The slow ones run what users run."""
    if "not slow" in config.getoption("markexpr"):
        quick = (
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_use_fusion_emitters=false",
        )
        os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *quick))


import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from partwise.client.batches import Examples  # noqa: E402
from partwise.client.state import Client  # noqa: E402
from partwise.data.store import ClientStore  # noqa: E402
from partwise.model.partition import Partition  # noqa: E402
from partwise.model.spec import Metric, Model, squared_error  # noqa: E402
from partwise.selection.keys import own_keys  # noqa: E402
from partwise.selection.slices import Keys, receive  # noqa: E402
from partwise.simulation import loop  # noqa: E402

# The first example compiles, and machines may be busy: no property is about its time.
settings.register_profile("partwise", deadline=None)
settings.load_profile("partwise")


def _store(counts: Any, ids: Any = None, **columns: Any) -> ClientStore:
    """Clients with so many rows each, in order; nothing is checked, so that a test may plant a NaN."""
    counts = np.asarray(counts)
    ids = np.arange(len(counts)) + 100 if ids is None else np.asarray(ids)
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    return ClientStore(arrays, np.cumsum(counts) - counts, counts, ids)


def _ratings(
    counts: Any, num_items: int, seed: int = 0, ids: Any = None, distinct: int | None = None
) -> ClientStore:
    """Random items and ratings; `user` is the client's position.

    `distinct` is how many items a client rates that has so many examples; clients with as many keys as one
    another share the small programs of the plain loop.
    """
    rng, total = np.random.default_rng(seed), int(np.sum(counts))
    items = rng.integers(0, num_items, total)
    if distinct:
        parts = []
        for count in counts:
            pool = rng.permutation(num_items)[:distinct]
            parts.append(rng.permutation(np.append(pool[:count], rng.choice(pool, max(count - distinct, 0)))))
        items = np.concatenate(parts)
    return _store(
        counts,
        ids,
        user=np.repeat(np.arange(len(counts)), counts).astype(np.int32),
        item=items.astype(np.int32),
        rating=rng.integers(1, 6, total).astype(np.float32),
    )


def _client(
    model: Model, partition: Partition, params: Any, store: ClientStore, position: int = 0, seed: int = 0
) -> Client:
    """One client of a store, with the tables whole, as a simulation would see it."""
    examples = store.gather([position])
    chosen, positions = own_keys(examples, partition)
    keys = {
        space: Keys(_never_empty(own.keys), jnp.asarray(0), jnp.asarray(len(own.keys)), max(len(own.keys), 1))
        for space, own in chosen.items()
    }
    filled = {
        name: _never_empty(column) for name, column in examples.columns.items() if name not in positions
    }
    positions = {name: _never_empty(column) for name, column in positions.items()}
    count = jnp.asarray(examples.num_examples)
    held = Examples(filled, positions, keys, jnp.asarray(0), count, count)
    return Client(
        model, partition, receive(partition, partition.split(params)[0]), held, jax.random.key(seed)
    )


def _never_empty(column: np.ndarray) -> jax.Array:
    return jnp.asarray(column if len(column) else np.zeros((1, *column.shape[1:]), column.dtype))


def _biased(num_items: int, dim: int, scale: float = 0.3) -> Model:
    """rating ~ item . user + offset[item] + base: something for every role."""

    def init(rng: jax.Array) -> dict:
        user, item, offset = jax.random.split(rng, 3)
        return {
            "user": scale * jax.random.normal(user, (dim,)),
            "item": {
                "table": scale * jax.random.normal(item, (num_items, dim)),
                "offset": scale * jax.random.normal(offset, (num_items,)),
            },
            "base": jnp.full((1,), 0.5),
        }

    def predict(params: dict, batch: dict, rng: jax.Array) -> jax.Array:
        item = params["item"]
        score = jnp.sum(item["table"][batch["item"]] * params["user"], axis=-1)
        return score + item["offset"][batch["item"]] + params["base"][0]

    error = lambda outputs, batch: squared_error(outputs, batch, "rating")
    return Model(init, predict, error, {"rmse": Metric(error, np.sqrt)})


@pytest.fixture(scope="session")
def make_store() -> Callable[..., ClientStore]:
    return _store


@pytest.fixture(scope="session")
def make_ratings() -> Callable[..., ClientStore]:
    return _ratings


@pytest.fixture(scope="session")
def make_client() -> Callable[..., Client]:
    return _client


@pytest.fixture(scope="session")
def biased_model() -> Callable[..., Model]:
    return _biased


@pytest.fixture(scope="session")
def liked_folder(tmp_path_factory):
    """A tiny ml-1m folder, for `movielens-liked`: of 24 users women like movies 10 to 24, men 30 to 44."""
    path = tmp_path_factory.mktemp("ml-1m")
    ratings, users = [], []
    for user in range(1, 25):
        woman = user % 2
        users.append(f"{user}::{'F' if woman else 'M'}::{(18, 25, 56)[user % 3]}::1::x\n")
        for repeat in range(5):
            for k, movie in enumerate((10, 20, 30, 40)):
                stars = 5 if (k < 2) == bool(woman) else 2
                ratings.append(f"{user}::{movie + repeat}::{stars}::{user}\n")
    (path / "ratings.dat").write_text("".join(ratings))
    (path / "users.dat").write_text("".join(users))
    return path


@pytest.fixture(scope="session")
def recorded_cohorts():
    """A context in which the clients of every round are written down, a list for each training."""

    @contextmanager
    def recorded():
        drawn = []

        def recruit(recruiting, counts, seed, round_number):
            cohort = original(recruiting, counts, seed, round_number)
            if round_number == 0:
                drawn.append([])
            drawn[-1].append((seed, cohort.clients.tolist()))
            return cohort

        original = loop.recruit
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "recruit", recruit)
            yield drawn

    return recorded


@pytest.fixture(scope="session")
def s3_server():
    """Host and port of an S3 server."""
    server = pytest.importorskip("moto.server", reason="the extra `test` has an S3 server")
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    yield "{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """A function that makes a bucket and returns the address of a prefix in it."""
    for name, value in {
        "ACCESS_KEY_ID": "test",
        "SECRET_ACCESS_KEY": "test",
        "EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)

    def make(bucket: str) -> str:
        connection = http.client.HTTPConnection(s3_server)
        connection.request("PUT", f"/{bucket}")
        assert connection.getresponse().status == 200
        return f"s3://{bucket}/models/one?region=us-east-1&scheme=http&endpoint_override={s3_server}"

    return make


class Asked(NamedTuple):
    """A request to an S3 server."""

    method: str
    name: str  # of the file
    size: int  # bytes of the range; 0: no range


class Between:
    """A proxy before an S3 server. It keeps what is asked. `fault(asked)` says what to do to a request: None, the
    status of an error, "cut" for half an answer, or seconds before the answer."""

    def __init__(self, server: str):
        self.asked: list[Asked] = []
        self.fault: Callable[[Asked], Any] = lambda asked: None
        between = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            log_message = lambda *_: None

            def do_GET(self) -> None:
                found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                size = int(found[2]) - int(found[1]) + 1 if found else 0
                asked = Asked(self.command, self.path.split("?")[0].rpartition("/")[2], size)
                between.asked.append(asked)
                fault = between.fault(asked)
                if isinstance(fault, float):
                    time.sleep(fault)
                if isinstance(fault, int):
                    self.send_response(fault)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    self._pass_on(cut=fault == "cut")

            do_HEAD = do_GET  # noqa: N815

            def _pass_on(self, cut: bool) -> None:
                connection = http.client.HTTPConnection(server)
                connection.request(self.command, self.path, headers=dict(self.headers))
                answer = connection.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                self.close_connection = cut

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # of a client that gave up
        self.host = "{}:{}".format(*self._server.server_address)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bytes_of(self, name: str) -> int:
        """How many bytes of the files with this name were asked for by range."""
        return sum(asked.size for asked in self.asked if asked.name == name)


@pytest.fixture
def between(s3_server):
    """A proxy before the S3 server."""
    proxy = Between(s3_server)
    yield proxy
    proxy.close()


@pytest.fixture
def start_together():
    """Start processes that train together, each with its own words for Python (`-m partwise.cli train ...`) and its
    share of the devices. They are killed at the end."""
    running = []

    def start(*words: list[str], devices: int = 1, **environment: str) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        for index, given in enumerate(words):
            place = {"PARTWISE_COORDINATOR": address, "PARTWISE_PROCESSES": str(len(words))}
            place |= {"PARTWISE_PROCESS": str(index), "JAX_NUM_CPU_DEVICES": str(devices)}
            running.append(
                subprocess.Popen(
                    [sys.executable, *given],
                    env=os.environ | place | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return running[-len(words) :]

    yield start
    for process in running:
        process.kill()
        process.communicate()
