"""Parts for tests: an algorithm with a reconstruction, a server with an optimizer, and a plan of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from partwise.parts import Part, choice, choices, flag, number, numbers, part, rate, text, whole
from partwise.types import UserError


class Schedule(Part, static=True):
    """A factor of a rate."""


@part("cosine")
class Cosine(Schedule):
    end: float = number(0.0, "the factor at the end", 0, 1)


@part("values")
class Values(Schedule):
    factors: tuple[float, ...] = numbers((), "the factors", 0, 10)


class Optimizer(Part):
    """What makes a step."""


@part("sgd")
class Sgd(Optimizer):
    learning_rate: float = rate(0.1, "the size of a step")
    momentum: float | None = number(None, "share of the last step", 0, 0.9999)
    schedule: Schedule | None = choice(None, "the factor by round")


@part("adagrad")
class Adagrad(Optimizer):
    learning_rate: float = rate(0.1, "the size of a step")
    epsilon: float = number(1e-3, "added to the sum of squares", 1e-12, 1e6)
    schedule: Schedule | None = choice(None, "the factor by round")


class Mean(Part, static=True):
    """How updates are combined."""


@part("cohort")
class CohortMean(Mean):
    """The mean over the cohort."""


@part("heat")
class Heat(Mean):
    max_factor: float | None = number(None, "the largest factor", 1, 1e30)


@part("server")
class Server(Part):
    MAIN: ClassVar[str] = "optimizer"
    optimizer: Optimizer = choice(Sgd(1.0), "what makes a step")
    mean: Mean = choice(CohortMean(), "how updates are combined")


class Reconstruct(Part):
    """R."""

    def __call__(self, value):
        raise NotImplementedError


@part("skip")
class Skip(Reconstruct):
    def __call__(self, value):
        return value


@part("solve")
class Solve(Reconstruct):
    l2: float = rate(0.5, "strength of the pull")

    def __call__(self, value):
        return self.l2 * value


@part("steps")
class Steps(Reconstruct):
    optimizer: Optimizer = choice(Sgd(0.1), "what makes a step")
    batch_size: int = whole(5, "examples in a batch", 1, 100_000)
    epochs: int | None = whole(5, "passes at most", 0, 10_000)
    max_steps: int | None = whole(50, "batches at most", 0, 10**8)
    l2: float | None = rate(None, "strength of the pull; none: no pull")
    joint: bool = flag(False, "train the local part along")

    def validate(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise UserError("steps need epochs, max_steps or both; without either they would never end")


class Algorithm(Part):
    """What clients do."""


@part("fed_recon")
class FedRecon(Algorithm):
    reconstruct: Reconstruct = choice(Steps(), "R: how the local part is rebuilt")
    evaluated: Reconstruct | None = choice(None, "R in an evaluation; none: as in training")
    passes: int = whole(1, "how often", 1, 100)


class Keys(Part, static=True):
    """Which keys a client asks for."""

    MAIN: ClassVar[str] = "count"


@part("own")
class Own(Keys):
    MAIN: ClassVar[str] = ""


@part("top")
class Top(Keys):
    count: int = whole(100, "keys at most", 1, 10**8)


@part("cohort")
class Cohort(Part, static=True):
    MAIN: ClassVar[str] = "size"
    size: int = whole(50, "clients of a round", 1, 10**8)
    dropout: float = number(0.0, "chance that a client never reports", 0, 0.99)


@part("stop")
class Stop(Part, static=True):
    metric: str = text("rmse", "a metric")
    patience: int = whole(5, "evaluations", 1, 100)


@part("plan")
class Plan(Part, static=True):
    MAIN: ClassVar[str] = "algorithm"
    task: str = text("planted", "a task")
    algorithm: Algorithm = choice(FedRecon(), "what clients do")
    server: Server = choice(Server(), "how the server moves")
    cohort: Cohort = choice(Cohort(), "who takes part")
    select: Mapping[str, Keys] = choices("keys that a client asks for, by key space")
    stop: Stop | None = choice(None, "when a run ends early")
    rounds: int = whole(500, "rounds of the run", 1, 10**8, resume=True)
    seed: int = whole(0, "what randomness comes from", 0, 2**32 - 1)
    backend: Literal["compiled", "plain"] = text("compiled", "how rounds are run", identity=False)
    evaluate_every: int = whole(50, "rounds between evaluations", 0, 10**8, resume=True, identity=False)
