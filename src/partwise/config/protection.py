"""What a configuration promises to clients (`privacy.*`): the door, the ledger, and the budget."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from partwise.config.private_settings import CORRELATED, check_fits, check_unset
from partwise.config.settings import Config
from partwise.config.sum_sizes import check_shares, least_of, most_of, quorum_of
from partwise.privacy.accounting import Rounds, default_delta, gaussian_noise
from partwise.privacy.grid import Grid
from partwise.privacy.ledger import Ledger, SingleRelease
from partwise.privacy.matrix import Matrix, make_matrix
from partwise.server.cohort import parse_sampling
from partwise.server.private_sum import Door
from partwise.types import UserError

STEPS = (1, 1.5, 2, 3, 5, 7)  # epsilon is computed for these numbers of rounds, times powers of ten


SEEN = {  # what a promise rests on, by `privacy.sums`
    "plain": "nobody but the server sees updates, and sums before the noise",
    "masked": "nobody but the server sees sums before the noise, and nobody a client's update",
    "two_servers": "the two servers do not tell each other what they see; each adds all of the noise",
}


class HeatPromise(NamedTuple):
    """How heat is counted: with noise (in units of what a client adds) for clients, or by bits that clients flip,
    which protects single keys."""

    kind: str
    epsilon: float
    noise: float = 0.0

    @property
    def words(self) -> str:
        """What is said of it wherever epsilon is."""
        if self.kind == "gaussian":
            return "counted with noise, per client, included in epsilon"
        return f"epsilon {self.epsilon:g} per key, not per client, not included in epsilon"


class Protection(NamedTuple):
    """A promise to every client.

    door:      what is done to every sum
    ledger:    what is released, and what it costs
    budget:    the largest epsilon; infinite if there is none
    simulated: whether the noise is that of a larger cohort, so that nobody is protected
    heat:      how heat is counted; None: not at all
    sums:      who sees what before the noise (`privacy.sums`)
    least:     the fewest clients that a sum over a network is of
    """

    door: Door
    ledger: Ledger
    budget: float
    simulated: bool
    heat: HeatPromise | None = None
    sums: str = "plain"
    least: int = 1

    @property
    def rounds(self) -> Rounds:
        """What a round costs."""
        return self.ledger.rounds

    def most_rounds(self, wanted: int) -> int:
        """How many rounds of those that are wanted fit into the budget."""
        return wanted if math.isinf(self.budget) else self.ledger.most_rounds(self.budget, wanted)

    def spent(self, number: int, exactly: bool = False) -> dict[str, Any]:
        """What is said of the promise after so many rounds. Unless it is asked for exactly, epsilon is that of a
        few more rounds, which takes less time to find."""
        at = number if exactly else _a_few_more(number)
        told = {"epsilon": self.ledger.epsilon(at), "delta": self.ledger.delta, "simulated": self.simulated}
        return told | ({"heat": self.heat.words} if self.heat else {})

    def promise(self, number: int) -> dict[str, Any]:
        """The whole promise after so many rounds: the numbers, the unit, and what they rest on."""
        resting = [
            _drawn(self.rounds),
            self._seen(),
            "neither the noise nor who is drawn can be guessed",
        ]
        if self.simulated:
            resting.append(
                f"SIMULATION: the noise is that of cohorts of {self.rounds.cohort:g}, and nobody is protected"
            )
        uncovered = "metrics of validation, test and held-out clients, who are promised nothing"
        if self.heat and self.heat.kind == "response":
            uncovered += f"; and heat: {self.heat.words}"
        return self.spent(number, exactly=True) | {
            "unit": "all data of a client, in all rounds",
            "relation": self.rounds.relation,
            "clip": self.door.clip,
            "noise": self.rounds.noise,
            "ledger": self.ledger.entries(number),
            "rests_on": resting,
            "not_covered": uncovered,
        }

    def _seen(self) -> str:
        """What the promise says of who sees what."""
        if not self.rounds.grid:
            return SEEN[self.sums]
        most = self.rounds.grid.most
        return (
            f"at least {self.least} clients of a sum add their share of the noise, one part in {most}, and keep it "
            f"secret; the server adds the parts of those who do not come. It sees sums with the clients' noise "
            f"alone, and knows who takes part: what it is promised is less"
        )


def protection(config: Config, num_clients: int, trials: int = 1) -> Protection | None:
    """The promise of a configuration for a population of so many (over a network, of `deploy.population`), and for
    so many runs with it; None if there is none."""
    part, num_clients = config.privacy, config.deploy.population or num_clients
    if part.clip is None:
        check_unset(config)
        return None
    check_fits(config)
    size = _noise_cohort(config, num_clients)
    delta = part.delta if part.delta is not None else default_delta(num_clients)
    matrix = _matrix(config)
    door = _door(config, matrix)
    rounds = _rounds(config, num_clients, size, matrix)._replace(trials=trials)
    if part.mechanism == "skellam":
        check_shares(config, rounds, delta)
        rounds = rounds._replace(grid=grid_of(door, rounds))
    heat = _heat(config, rounds, delta)
    once = (SingleRelease("heat: counts of the holders of keys", heat.noise),) if heat and heat.noise else ()
    ledger = _with_noise(config, Ledger(rounds, delta, once, _parts(config)))
    budget = part.epsilon if part.epsilon is not None else math.inf
    door = door._replace(noise=ledger.rounds.noise * config.cohort.size / size)
    least = least_of(config, quorum_of(config))
    return Protection(door, ledger, budget, size != config.cohort.size, heat, part.sums, least)


def grid_of(door: Door, rounds: Rounds) -> Grid:
    """The whole numbers that secure sums are of."""
    return Grid(most_of(rounds), door.clip, door.share, door.spread)


def _door(config: Config, matrix: Matrix | None) -> Door:
    """The door, without its noise."""
    part = config.privacy
    return Door(
        clip=part.clip or 0.0,
        noise=0.0,
        cohort=config.cohort.size,
        share=part.share,
        loss_bound=part.loss_bound,
        quantile=part.clip_quantile,
        clip_rate=part.clip_rate,
        rows_share=part.rows_share if part.rows == "filtered" else 0.0,
        rows_above=part.rows_threshold,
        matrix=matrix,
    )


def _rounds(config: Config, num_clients: int, size: int, matrix: Matrix | None) -> Rounds:
    sampling = parse_sampling(config.cohort.sampling)
    name, most = sampling.name.partition(":")[0], sampling.most(config.cohort.size)
    most = most * size // config.cohort.size if most and name == "poisson" else None
    column = matrix.column(max(config.rounds, 1)) if matrix else ()
    return Rounds(0.0, size, num_clients, name, most, sampling.wait, column)


def _noise_cohort(config: Config, num_clients: int) -> int:
    """The size of the cohorts whose noise is used."""
    size = config.privacy.noise_cohort or config.cohort.size
    largest = num_clients // parse_sampling(config.cohort.sampling).wait
    if not config.cohort.size <= size <= largest:
        raise UserError(
            f"privacy.noise_cohort = {size:,} must be from cohort.size = {config.cohort.size:,} to the number of "
            f"clients that a cohort is drawn from, {largest:,}"
        )
    return size


def _matrix(config: Config) -> Matrix | None:
    part = config.privacy
    if part.mechanism not in CORRELATED:
        return None
    wait = parse_sampling(config.cohort.sampling).wait
    return make_matrix(part.mechanism, max(config.rounds, 2), wait, part.buffers)


def _heat(config: Config, rounds: Rounds, delta: float) -> HeatPromise | None:
    part = config.privacy
    if config.server.mean != "heat" or part.heat == "none":
        return None
    if part.heat != "gaussian":
        return HeatPromise(part.heat, part.heat_epsilon)
    relation = "replaced" if rounds.sampling == "fixed" else "added"
    return HeatPromise(
        part.heat,
        part.heat_epsilon,
        part.heat_noise or gaussian_noise(part.heat_epsilon, delta, relation),
    )


def _parts(config: Config) -> tuple[str, ...]:
    """What is in the sum of a round besides the update, in words."""
    within = ("number of clients within the clip",) if config.privacy.clip_quantile else ()
    rows = ("counts of the holders of rows",) if config.privacy.rows == "filtered" else ()
    return ("number of clients", "their loss", *within, *rows)


def _with_noise(config: Config, ledger: Ledger) -> Ledger:
    part = config.privacy
    if part.noise is not None:
        return ledger._replace(rounds=ledger.rounds._replace(noise=part.noise))
    if part.epsilon is None:
        raise UserError(
            "privacy.clip is set, and neither privacy.noise nor privacy.epsilon: give the budget "
            "(privacy.epsilon=8), or the noise (privacy.noise=0.6; 0 for clipping alone)"
        )
    return ledger.calibrated(config.rounds, part.epsilon)


def _drawn(rounds: Rounds) -> str:
    """What the promise says of how cohorts are drawn."""
    if rounds.sampling == "apart":
        return f"a client that took part waits {rounds.separation} rounds; epsilon is of all rounds as one release"
    if rounds.sampling == "fixed":
        return f"a cohort of {rounds.cohort:g} is drawn without replacement in every round"
    most = f", and at most {rounds.most} are used" if rounds.most else ""
    return (
        f"every client is drawn with the chance {rounds.cohort / rounds.population:.4g} in every round{most}"
    )


def _a_few_more(number: int) -> int:
    """The next number of rounds for which epsilon is computed."""
    if number == 0:
        return 0
    scale = 10 ** int(math.log10(number))
    found = [math.ceil(step * power) for power in (scale, 10 * scale) for step in STEPS]
    return min(each for each in found if each >= number)
