"""The first screen: what was trained and how good it is, in a sentence, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence

from partwise.pages.numbers import brief, definition_list, number, size, spread, text, whole
from partwise.pages.run_groups import Group, by_task, metric_names, spread_of, test_metric
from partwise.runs.run_view import RunView
from partwise.types import counted

LOWER = (
    "loss",
    "rmse",
    "mse",
    "mae",
    "error",
    "perplexity",
)  # words in names of metrics that should be small
MOST_TILES = 3  # metrics among the numbers


def make_lead(groups: Sequence[Group], live: bool = False) -> str:
    """Heading, sentence, numbers and notices. A live page says below this what is not done yet."""
    runs = [run for group in groups for run in group.runs]
    judged = any(map(_main, groups))
    tiles = _all_tiles(groups) if judged or not live else ""
    notices = "" if live else _notices(runs)
    begun = not live or any(run.series.rounds for run in runs)
    sentence = f'<p class="sentence">{_sentence(groups)}</p>' if begun else ""
    return f"<h1>{text(title_of(groups))}</h1>{sentence}{tiles}{notices}"


def title_of(groups: Sequence[Group]) -> str:
    """What the page is about, in a few words."""
    if not any(group.first.settings for group in groups):
        return groups[0].label
    tasks = by_task(groups)
    algorithms = dict.fromkeys(str(group.first.settings.get("algorithm", "training")) for group in groups)
    if len(tasks) == len(algorithms) == 1:
        return f"{next(iter(algorithms))} on {next(iter(tasks))}"
    return f"{counted(len(groups), 'training')} on {', '.join(tasks)}"


def _sentence(groups: Sequence[Group]) -> str:
    """What came of the trainings. Those of different tasks are not compared."""
    judged = [group for group in groups if _main(group)]
    if not judged:
        return _unjudged(groups)
    tasks = {group.task for group in judged}
    return " ".join(_of_task(each, len(tasks) > 1) for task, each in by_task(groups).items() if task in tasks)


def _of_task(groups: Sequence[Group], named: bool) -> str:
    best = _leading([group for group in groups if _main(group)])
    metric = _main(best)
    reachable = (best.first.summary.get("best") or {}).get(metric)
    where = f" on {text(best.task)}" if named else ""
    who = f"Of {len(groups)} trainings{where}, <b>{text(best.label)}</b> is best: its"
    ends = (
        f", where {number(reachable)} is the best that any method can reach" if reachable is not None else ""
    )
    return (
        f"{who if len(groups) > 1 else _trained(best) + ' Its'} {text(metric)} is "
        f"<b>{spread(test_metric(best, metric))}</b> on {_test_clients(best.first)}{ends}.{_promise(best.first)}"
    )


def _leading(groups: Sequence[Group]) -> Group:
    """The group whose main metric is best, among those that have the same one as the first."""
    metric = _main(groups[0])
    sign = 1 if is_lower_better(groups[0], metric) else -1
    known = [(group, test_metric(group, metric)) for group in groups]
    return min(((group, found.mean) for group, found in known if found), key=lambda pair: sign * pair[1])[0]


def is_lower_better(group: Group, metric: str) -> bool:
    """Whether smaller values of a metric are better: as the run says, or of an older run by the metric's name."""
    said = (group.first.summary.get("better") or {}).get(metric)
    return said == "lower" if said else any(word in metric.lower() for word in LOWER)


def _main(group: Group) -> str:
    """The main metric of the test clients; empty if there is none."""
    names = metric_names(group.runs)
    return next((name for name in names if test_metric(group, name)), "")


def _trained(group: Group) -> str:
    settings, runs = group.first.settings, group.runs
    seeds = f" with {len(runs)} seeds" if len(runs) > 1 else ""
    rounds = counted(int(group.first.summary.get("rounds", group.first.rounds)), "round")
    return (
        f"{text(settings.get('algorithm'))} was trained on {text(settings.get('task'))} for {rounds}{seeds}."
    )


def _test_clients(run: RunView) -> str:
    test = run.summary["test"]
    judged = (test.get("judged") or {}).get("clients", "")
    kind = f"{text(judged)} " if judged in ("seen", "unseen") else ""
    return f"{whole(test.get('clients'))} {kind}test clients"


def _promise(run: RunView) -> str:
    told = run.summary.get("privacy")
    if not told:
        return ""
    if told.get("simulated"):
        return " Its privacy is simulated: nobody is protected."
    return (
        f" Its clients are promised epsilon {brief(told.get('epsilon'))} at delta {brief(told.get('delta'))}."
    )


def _unjudged(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    done = max((run.series.rounds[-1] for run in runs if run.series.rounds), default=0)
    of = max((run.rounds for run in runs), default=0)
    if not done:
        return f"No round{f' of {whole(of)}' if of else ''} is recorded yet."
    yet = "" if all(run.state == "failed" for run in runs) else " yet"
    return (
        f"{whole(done)} of {counted(of, 'round')} are recorded, and there is no result on test clients{yet}."
    )


def _all_tiles(groups: Sequence[Group]) -> str:
    """The numbers of every task by themselves."""
    tasks = by_task(groups)
    named = lambda task: f'<p class="about">On {text(task)}</p>' if len(tasks) > 1 else ""
    return "".join(f"{named(task)}{definition_list(_tiles(each), 'tiles')}" for task, each in tasks.items())


def _tiles(groups: Sequence[Group]) -> dict[str, str]:
    """The numbers of one group; of several of a task, those of the one that is best."""
    judged = [group for group in groups if _main(group)]
    group = _leading(judged) if judged else groups[0]
    run, tiles = group.first, dict[str, str]()
    names = [name for name in metric_names(group.runs) if test_metric(group, name)]
    for name in names[:MOST_TILES]:
        tiles[f"test {name}"] = spread(test_metric(group, name))
    reached = len(run.series.rounds)
    tiles["rounds"] = (
        whole(reached) if reached >= run.rounds else f"{whole(reached)} <small>of {whole(run.rounds)}</small>"
    )
    sent = [
        spread_of(each.summary.get(f"bytes_{way}_per_client") for each in group.runs)
        for way in ("down", "up")
    ]
    if all(sent):
        tiles["a client fetches / sends"] = " <small>/</small> ".join(
            size(each.mean) for each in sent if each
        )
    if run.summary.get("privacy"):
        tiles["epsilon"] = brief(run.summary["privacy"].get("epsilon"))
    return tiles


def _notices(runs: Sequence[RunView]) -> str:
    """Runs that are not whole."""
    lines = []
    for run in runs:
        if run.state == "unfinished":
            done = f"{len(run.series.rounds):,} of {counted(run.rounds, 'round')}"
            lines.append(f"<li><b>{text(run.name)}</b> has not ended: {done} are recorded.</li>")
        elif run.state == "failed":
            done = f"{len(run.series.rounds):,} of {counted(run.rounds, 'round')}"
            lines.append(f"<li><b>{text(run.name)}</b> failed after {done}: {text(run.failed)}</li>")
        elif run.state == "damaged":
            lines.append(f"<li><b>{text(run.name)}</b> is damaged: {text(run.problem)}.</li>")
    return f'<ul class="notices" role="note">{"".join(lines)}</ul>' if lines else ""
