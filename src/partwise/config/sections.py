"""The sections of a configuration: every setting with its default, its meaning and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partwise.types import Limits

LARGEST = 1e30  # the largest rate: far beyond practical use, and still a float32
LARGEST_BATCH = 100_000  # examples side by side on a client; more than any has, and little memory
MOST_ROUNDS = 10**8
MOST_EPOCHS, MOST_STEPS = 10_000, 10**8  # their products are still counted in 32 bits
SCHEDULE = (
    "constant, cosine[:END], linear[:END], polynomial:POWER[:END], exponential:FACTOR, warmup:ROUNDS, "
    "warmup_cosine:ROUNDS[:END], piecewise:ROUND=FACTOR,..."
)
MOMENT, LONGEST = 0.001, 10**8  # seconds


def setting(default: Any, meaning: str, least: float | None = None, most: float | None = None) -> Any:
    """A setting: its default, its meaning (shown by `partwise settings`), and for a number the smallest and
    the largest value."""
    limits = None if least is None or most is None else Limits(least, most)
    return field(default=default, metadata={"meaning": meaning, "limits": limits})


@dataclass(frozen=True)
class CohortConfig:
    """Which clients take part in a round (see server.cohort)."""

    size: int = setting(50, "clients whose reports are wanted in a round", 1, 10**8)
    sampling: str = setting(
        "fixed",
        "fixed: cohorts of that size; poisson: every client with the chance size / all, so that sizes vary around "
        "it; poisson:MOST: the same, and never more than so many; apart:ROUNDS: cohorts of that size, and a client "
        "waits at least so many rounds",
    )
    over_selection: float = setting(1.0, "so many times more clients are asked", 1, 1000)
    dropout: float = setting(0.0, "chance that a client that was asked never reports", 0, 0.99)
    min_examples: int = setting(0, "reports of clients with fewer examples are not used", 0, 10**9)


@dataclass(frozen=True)
class SplitConfig:
    """Support and query sets. For evaluation, `kind` may also be `same`: as in training, or alternate if
    training has none or random ones."""

    kind: str = setting(
        "alternate",
        "support and query: alternate (batches), random (alternate, in an order that changes every round), halves "
        "(first percent, rest), last (all but the last count, these), none; evaluation: same, or any but random",
    )
    batch_size: int = setting(5, "examples in a batch that goes to support or query (alternate)", 1, 10**6)
    percent: int = setting(50, "share of the examples that is support (halves)", 1, 99)
    count: int = setting(1, "examples at the end that are query (last)", 1, 10**6)


@dataclass(frozen=True)
class ReconstructConfig:
    """R: how a client rebuilds its local part from its support set."""

    method: str = setting("steps", "how the local part is rebuilt: steps, solve (closed form), skip")
    optimizer: str = setting("sgd", "the client's optimizer: sgd, adagrad, adam, yogi")
    rate: float = setting(0.1, "learning rate of the local part", 0, LARGEST)
    schedule: str = setting("constant", "the rate over the rounds of training, as server.schedule")
    epochs: int | None = setting(
        5, "passes over the support set at most; none: as many as max_steps allow", 0, MOST_EPOCHS
    )
    max_steps: int | None = setting(50, "batches at most; none: no limit", 0, MOST_STEPS)
    batch_size: int = setting(5, "examples in a batch", 1, LARGEST_BATCH)
    pull: float = setting(0.0, "strength of the pull of the local part towards its default", 0, LARGEST)


@dataclass(frozen=True)
class UpdateConfig:
    """U: how a client trains shared and keyed parts on its query set."""

    method: str = setting(
        "steps",
        "how shared and keyed parts are trained: steps, solve (closed form; ends beside the minimum where clients "
        "differ), through (one step that sees how the local part follows from them; with reconstruct.method = "
        "solve)",
    )
    optimizer: str = setting("sgd", "the client's optimizer: sgd, adagrad, adam, yogi")
    rate: float = setting(0.5, "learning rate of shared and keyed parts on a client", 0, LARGEST)
    schedule: str = setting("constant", "the rate over the rounds, as server.schedule")
    epochs: int | None = setting(
        1, "passes over the query set at most; none: as many as max_steps allow", 0, MOST_EPOCHS
    )
    max_steps: int | None = setting(50, "batches at most; none: no limit", 0, MOST_STEPS)
    batch_size: int = setting(5, "examples in a batch", 1, LARGEST_BATCH)
    begin: str = setting(
        "first", "with which of its batches a client begins: first, or random in every round"
    )
    joint: bool = setting(False, "train the local part along")
    precision: str = setting(
        "float32", "of products in a client's steps: float32, bfloat16 (faster on accelerators)"
    )
    pull: float = setting(1.0, "strength of the pull towards what was received (solve)", 0, LARGEST)


@dataclass(frozen=True)
class EvaluationConfig:
    """Which local part an evaluated client uses if the algorithm has no local part of this client."""

    local: str = setting(
        "rebuilt",
        "a judged client's local part: rebuilt from fresh values by reconstruct; tuned, the same from the values "
        "that the server trained; trained, those values as they are (tuned, trained: not after fed_recon)",
    )


@dataclass(frozen=True)
class FineTuneConfig:
    """Steps on shared and keyed parts, on the support set, before a client is evaluated."""

    max_steps: int | None = setting(
        0, "batches of fine-tuning before evaluation at most; 0: none", 0, MOST_STEPS
    )
    epochs: int | None = setting(
        5, "passes over the support set at most; none: as many as max_steps allow", 0, MOST_EPOCHS
    )
    batch_size: int = setting(5, "examples in a batch", 1, LARGEST_BATCH)
    optimizer: str = setting("sgd", "the client's optimizer: sgd, adagrad, adam, yogi")
    rate: float = setting(0.1, "learning rate of fine-tuning", 0, LARGEST)
    joint: bool = setting(False, "tune the local part along")


@dataclass(frozen=True)
class ServerConfig:
    """The server's optimizer with its own settings, and the weights of clients."""

    optimizer: str = setting(
        "sgd",
        "sgd, adagrad, adam, yogi, lazy_adam, lazy_yogi (these: only rows that were asked for); "
        "its own settings are server.settings.NAME",
    )
    rate: float = setting(1.0, "the server's learning rate", 0, LARGEST)
    schedule: str = setting("constant", f"the rate over the rounds: {SCHEDULE}")
    weighting: str = setting("examples", "what a client weighs: examples (of its query set), uniform")
    mean: str = setting(
        "cohort",
        "a keyed row's mean over the cohort, over the holders of its key in it, or over the cohort and "
        "corrected by heat (counted over all clients that can take part) or seen (its estimate from the cohorts "
        "so far)",
    )
    cap: float | None = setting(None, "largest factor that heat gives a row; none: no bound", 1, LARGEST)
    counts: str = setting(
        "",
        "folder of a run of count_heat, whose counts are the heat; empty: counted in the data that is here",
    )
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServingConfig:
    """How slices are served (see selection.serving). This changes the costs, not the training."""

    way: str = setting(
        "on_demand",
        "how slices come to clients: broadcast, on_demand, pregenerated, private (of two servers, none sees keys)",
    )


@dataclass(frozen=True)
class SimulationConfig:
    """How the rounds are run."""

    backend: str = setting(
        "compiled",
        "compiled, plain (one client at a time; names the one that fails), or eager (plain, and step by step: for "
        "print and a debugger)",
    )
    lanes: int = setting(0, "clients side by side on a device; 0: measured and chosen", 0, 65_536)
    rounds_per_call: int = setting(25, "rounds in one compiled call", 1, 10_000)
    tables: str = setting(
        "auto",
        "where tables of keyed rows are: copies (on every device), shards (rows spread over the devices), host (on "
        "the device only the rows of a call); auto: by their size",
    )
    evaluate_every: int = setting(
        50, "rounds between looks at the validation clients; 0: only at the end", 0, MOST_ROUNDS
    )
    checkpoint_every: int = setting(100, "rounds between checkpoints; 0: only at the end", 0, MOST_ROUNDS)
    patience: int = setting(
        20,
        "rounds that may go wrong (most updates not finite, or the loss exploded) before a run stops; 0: no end",
        0,
        MOST_ROUNDS,
    )


@dataclass(frozen=True)
class StopConfig:
    """When a run ends before its last round (see runs.stopping)."""

    metric: str = setting(
        "",
        "a metric of the validation clients, as rmse or over_clients.rmse.p95: the run ends when it gets no "
        "better; empty: it does not",
    )
    patience: int = setting(5, "evaluations that the metric may get no better", 1, MOST_ROUNDS)
    difference: float = setting(0.0, "by how much it must be better than the best to count", 0, LARGEST)
    seconds: float | None = setting(
        None, "seconds that the run may take, with all that it was resumed; none: no limit", MOMENT, LONGEST
    )


@dataclass(frozen=True)
class KeepConfig:
    """What is kept of a run beside its last model (see runs.keeping)."""

    best: str = setting(
        "", "a metric of the validation clients: the model with the best is kept too; empty: none"
    )


@dataclass(frozen=True)
class PrivacyConfig:
    """What clients are promised: differential privacy of all their data (see server.private_sum)."""

    clip: float | None = setting(
        None, "largest norm of a client's whole update; none: nothing is promised", 1e-30, LARGEST
    )
    noise: float | None = setting(
        None,
        "standard deviation of the noise in units of the clip; none: found from epsilon and rounds",
        0,
        1e6,
    )
    epsilon: float | None = setting(
        None, "the budget: the run ends before it is spent; none: no budget", 1e-6, 1e6
    )
    delta: float | None = setting(
        None, "chance that the promise does not hold; none: clients to the power of -1.1", 1e-30, 0.1
    )
    noise_cohort: int = setting(
        0,
        "noise as if cohorts were so large, to study these; such a run protects nobody; 0: as they are",
        0,
        10**9,
    )
    share: float = setting(
        0.1, "part of the clip for the number of clients, for their loss, and for who was clipped", 1e-3, 10
    )
    loss_bound: float = setting(
        10.0, "a client's mean loss counts up to this in the noisy one", 1e-6, LARGEST
    )
    sums: str = setting(
        "plain",
        "who sees a client's update: the server (plain); nobody, by masks that cancel in the sum (masked); nobody, "
        "unless two servers tell each other (two_servers)",
    )
    keys: int = setting(
        0,
        "keys of a space that a client fetches and sends at most; one with more keeps those it uses most; 0: all",
        0,
        10**8,
    )
    clip_quantile: float = setting(
        0.0,
        "share of the updates that should be within the clip, which then follows it; 0: the clip stays",
        0,
        1,
    )
    clip_rate: float = setting(0.2, "how fast the clip follows its quantile", 0, 10)
    heat: str = setting(
        "none",
        "how heat (server.mean = heat) is counted: gaussian, with noise and a promise to clients; response, every "
        "client flips bits, which protects single keys, not clients; none: not at all",
    )
    heat_epsilon: float = setting(1.0, "what counting heat costs; response: for each key", 1e-6, 1e6)
    heat_noise: float | None = setting(
        None,
        "noise of these counts in units of what a client adds to them; none: found from heat_epsilon",
        1e-3,
        1e6,
    )
    heat_keys: int = setting(100, "so many of a client's keys are counted at most (gaussian)", 1, 10**9)
    mechanism: str = setting(
        "independent",
        "noise of every round by itself, by the server (independent) or by the clients (skellam; it needs "
        "privacy.sums = masked), or taking back noise of earlier rounds (blt, banded; these need cohort.sampling "
        "= apart)",
    )
    buffers: int = setting(0, "tables of noise that blt and banded keep; 0: 2 for blt, 7 for banded", 0, 60)
    rows: str = setting(
        "all",
        "which keyed rows get noise: all, or filtered, those with a noisy count of holders above a bound",
    )
    rows_threshold: float = setting(
        2.0, "the bound on counts of rows, in standard deviations of their noise (filtered)", -10, 1e6
    )
    rows_share: float = setting(0.5, "part of the clip for the counts of rows (filtered)", 1e-3, 10)


@dataclass(frozen=True)
class DeployConfig:
    """How a run is deployed over a network (see deployment.coordinator). Simulations do not read it."""

    quorum: float = setting(1.0, "share of the cohort whose reports a round needs", 1e-6, 1)
    deadline: float = setting(600.0, "seconds after which a round waits no longer", MOMENT, LONGEST)
    lease: float = setting(120.0, "seconds that a device has for a task", MOMENT, LONGEST)
    closing: float = setting(
        60.0, "seconds after which another server may close a round that one began to close", MOMENT, LONGEST
    )
    fresh: float = setting(
        60.0, "seconds without a poll after which a device is not invited", MOMENT, LONGEST
    )
    hold: float = setting(20.0, "seconds that a poll waits for work at most", 0, 60)
    population: int = setting(0, "clients that must have joined before a round opens", 0, 10**9)
    needs: str = setting(
        "",
        "what invited devices must say of themselves: charging, unmetered, battery:0.3, load:0.8 or several",
    )
    buffer: int = setting(0, "reports that make a version, without rounds (FedBuff); 0: rounds", 0, 10**8)
    concurrency: int = setting(0, "tasks at a time (buffer); 0: cohort.size", 0, 10**8)
    staleness: float = setting(
        0.5, "a late update is divided by this power of 1 + the versions it is late (buffer)", 0, 10
    )
    stalest: int = setting(20, "versions after which a late report is refused (buffer)", 0, 10**6)
    reports: str = setting(
        "clients", "what a device of many clients sends: a report each (clients) or their sum (sum)"
    )
    precision: str = setting("float32", "how updates are sent: float32, float16, int8")
    page_rows: int = setting(8, "rows in a page (serving.way = pregenerated)", 1, 10**6)
    held_out: float = setting(0.0, "share of the clients that never train, and evaluate", 0, 0.99)
    evaluate_every: int = setting(
        0, "versions between evaluations by held-out clients; 0: none", 0, MOST_ROUNDS
    )
    keep: int = setting(20, "versions of the model that are kept", 1, MOST_ROUNDS)
    requests: int = setting(600, "requests of a device in a minute, at most", 1, 10**6)
