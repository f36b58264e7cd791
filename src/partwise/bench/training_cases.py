"""The trainings that are measured: the papers' settings, and how they grow."""

from __future__ import annotations

from collections.abc import Callable

from partwise.bench.case import Case


def fedrecon_movielens(quick: bool) -> list[Case]:
    case = lambda name, rounds=100, **changes: Case(
        name,
        "movielens",
        {"server.rate": 1.0} | {k.replace("__", "."): v for k, v in changes.items()},
        rounds,
    )
    setting = case("paper's setting, 100 clients")
    phases = [
        setting,
        case("  without reconstruction", reconstruct__max_steps=0),
        case("  without update", update__max_steps=0),
        case("closed form, 100 clients", reconstruct__method="solve", reconstruct__pull=2.0),
    ]
    cohorts = [
        case(f"cohort {size:,}", rounds=50, cohort__size=size)
        for size in ((10, 1000) if quick else (10, 30, 100, 300, 1000, 4832))
    ]
    items = [
        Case(
            f"generated, {number:,} items",
            "planted",
            {
                "data.num_items": number,
                "data.num_clients": 20_000,
                "data.mean_examples": 100,
                "data.dim": 50,
                "data.biases": False,
                "data.normalize": False,
                "cohort.size": 100,
                "data.initial": "random",
                "data.max_examples": 300,
                "split.kind": "alternate",
                "reconstruct.method": "steps",
                "reconstruct.pull": 0.0,
                "update.rate": 0.1,
                "update.begin": "first",
                "server.optimizer": "sgd",
                "server.rate": 1.0,
                "server.schedule": "constant",
            },
        )
        for number in ((10**3, 10**5) if quick else (10**3, 10**4, 10**5, 10**6))
    ]
    return [setting, *cohorts[:1], *items] if quick else [*phases, *cohorts, *items]


def select_logistic(quick: bool) -> list[Case]:
    """One-vs-rest logistic regression 10,000 x 500, 50 clients, one epoch in batches of 16: full broadcast,
    and m keys. Then tables of 64 columns with the same number of keys."""
    size = {"data.num_clients": 200 if quick else 1000, "simulation.rounds_per_call": 5}
    cases = [
        Case("full broadcast", "tags-planted", {**size, "select.word": "all"}, rounds=10),
        Case("m = 1,000", "tags-planted", {**size, "select.word": "top:1000"}, rounds=50),
        Case("m = 100", "tags-planted", {**size, "select.word": "top:100"}, rounds=50),
    ]
    tables = [
        Case(
            f"m = 500, table {rows:,} x 64",
            "tags-planted",
            {
                **size,
                "data.num_words": rows,
                "data.num_tags": 64,
                "data.num_clients": 200,
                "select.word": "top:500",
                "server.optimizer": "sgd",
                "server.rate": 1.0,
            },
            rounds=50,
        )
        for rows in (10**4, 10**5, 10**6)
    ]
    return cases[1:2] if quick else [*cases, *tables]


def writers(network: str) -> Callable[[bool], list[Case]]:
    """Federated averaging of all parameters: 62 classes, 28 x 28, 3,400 writers of log-normal size with
    median 180, 50 clients, batch 20, one epoch."""
    rounds = {"2nn": 20, "cnn": 3}[network]
    names = {"data.network": network, "algorithm": "fed_avg", "simulation.rounds_per_call": 1}
    small = {"data.num_clients": 60, "data.median": 20, "cohort.size": 4}
    return lambda quick: [
        Case("50 clients", "writers", {**names, **(small if quick else {})}, rounds=2 if quick else rounds)
    ]


def next_word(quick: bool) -> list[Case]:
    """The LSTM of FedRecon and of Reddi et al. at a vocabulary of 10,000 (on a CPU a narrower one at 1,000),
    with all parameters trained: 200 clients, 16 steps of 16 x 20 words each, by precision and lanes. Then
    with keyed words, and FedRecon."""
    import jax

    small = quick or jax.default_backend() == "cpu"
    shape = (
        {"data.num_words": 1000, "data.embedding": 32, "data.units": 64}
        if small
        else {"data.num_words": 10_000, "data.embedding": 96, "data.units": 670}
    )
    size = (
        {"data.num_clients": 40, "cohort.size": 16}
        if quick
        else {"data.num_clients": 300, "cohort.size": 200}
    )
    base = {
        **shape,
        **size,
        "data.words": "input",
        "data.num_buckets": 100,
        "data.length": 20,
        "data.sentences": 64 if quick else 256,
        **dict.fromkeys(("update.rate", "server.rate"), 1e-3),  # small, so that nothing diverges
        "simulation.rounds_per_call": 1,
    }
    lanes = (1, 4) if quick else (1, 2, 4, 8, 16) if small else (8, 25, 50, 100, 200)
    case = lambda name, precision, count, **more: Case(
        name,
        "next-word-planted",
        {**base, "data.precision": precision, "simulation.lanes": count, **more},
        rounds=3 if quick else 6,
    )
    return [
        *(
            case(f"{precision}, {count} lanes", precision, count, algorithm="fed_avg")
            for precision in ("float32", "bfloat16")
            for count in lanes
        ),
        case("words keyed", "bfloat16", lanes[-1], algorithm="fed_select", **{"data.words": "keyed"}),
        case("FedRecon", "bfloat16", lanes[-1], **{"reconstruct.rate": 1e-3}),
    ]
