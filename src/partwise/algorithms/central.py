"""All examples in one place, trained with plain SGD: the baseline for federated training.

A round is an epoch, or `update.max_steps` batches of examples of all clients (FedSubAvg's CentralSGD, with a batch
as large as those of its cohort together). Rounds then go through the shuffled examples, part by part in an order
drawn once, and begin again when all have been used; the last part may have fewer batches. What a round changed is
the step of the server's optimizer, by default as it is. With `update.max_steps` = 1 and `update.rate` = 1, it is
the gradient of one batch, so that `server.optimizer` = adam is Adam on batches.
"""

from __future__ import annotations

from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.algorithms.fed_avg import UNREAD, averaging, fed_avg, unselected
from partwise.algorithms.fed_recon import averaged_evaluation
from partwise.config.judged import server_side
from partwise.config.parts import rates_of
from partwise.config.settings import Config
from partwise.server.cohort import Recruiting, apart
from partwise.tasks.base import Task

PLAIN_SERVER = {
    "server.optimizer": "sgd",
    "server.rate": 1.0,
    "server.settings": {},
    "server.mean": "cohort",
}


def prepare(task: Task, config: Config) -> Prepared:
    """One client that has all examples, and a server that takes over what this client changes."""
    setting, part = server_side(task), config.update
    whole = unselected(task, config, CENTRAL).changed({"server.mean": "cohort"})
    pooled = task.train.select(setting.columns).pool().reorder(seed=config.seed)
    if part.max_steps:
        pooled = pooled.pool(part.max_steps * part.batch_size)
    if pooled.num_clients > 1 and part.epochs != 0:  # one pass over a part, however short the last one is
        whole = whole.changed({"update.epochs": 1})
    build = averaging(setting, whole, fed_avg)
    in_turn = Recruiting(1, sampling=apart(pooled.num_clients))
    return Prepared(build, rates_of(whole), pooled, in_turn, *averaged_evaluation(task, config, build))


CENTRAL = AlgorithmEntry(
    "centralised training on pooled data; a round is an epoch, or update.max_steps batches",
    prepare,
    {"update.max_steps": None, "server.optimizer": "sgd", "server.rate": 1.0},
    trains="stateful",
    selects=False,
    unread=UNREAD
    | {"cohort.*": "all examples are in one place, and there is no cohort"}
    | dict.fromkeys(("server.weighting", "server.mean"), "there is one client, and no mean"),
)
