"""Tables and sentences for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from partwise.types import counted

# What users name (paths, ids, columns) is shown unchanged: without markup, emojis or coloured numbers.
AS_IT_IS: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
err = Console(stderr=True, **AS_IT_IS)
out = Console(**AS_IT_IS)
SHOWN = 6  # how many numbers of a vector are shown


def say(text: str, where: Console = out) -> None:
    """Print a sentence on one line. A terminal wraps it, so text that is copied from it has no line breaks."""
    where.print(text, soft_wrap=True)


def listing(kind: str, entries: Mapping[str, str]) -> None:
    """A table of names and what they are."""
    table = Table(kind, "what it is")
    for name, text in entries.items():
        table.add_row(name, text)
    out.print(table)


def settings_table(lines: Sequence[Mapping[str, Any]], title: str) -> None:
    """A table of dotted keys, values and meanings."""
    table = Table("--set key", "value", "meaning", title=title)
    for line in lines:
        value = "none" if line["value"] is None else str(line["value"])
        table.add_row(line["key"], value, line["meaning"])
    out.print(table)


def summary(told: Mapping[str, Any], folder: Any) -> None:
    """The end of a run: metrics, what was left out, costs, and the folder. If the best model was kept, the metrics
    are its own."""
    best = told.get("best_model") or {}
    if best.get("test"):
        own = {**best["test"], "judged": told["test"]["judged"]}
        _metrics({**told, "test": own}, f", the best model, of round {best['round']:,}")
        if best["round"] != told["rounds"]:
            _last(told)
    else:
        _metrics(told, ", the last model" if best else "")
    _past_best(told)
    _left_out(told)
    if told.get("stopped"):
        say(f"Ended before its last round: {told['stopped']}.")
    if best:
        say(
            f"The best model is of round {best['round']:,} (validation {best['metric']} {best['value']:.4f}); it "
            f"is in best.safetensors (--model best)."
        )
    if told.get("privacy"):
        promise(told["privacy"])
    down, up = told["bytes_down_per_client"], told["bytes_up_per_client"]
    fetched = f"; a client fetched {down / 1e3:.1f} kB and sent {up / 1e3:.1f} kB a round" if down else ""
    say(
        f"{_clients(told['test'])}{fetched}; {1e3 * told['seconds_per_round']:.2f} ms a round "
        f"({counted(told['lanes'], 'lane')}, {told['device']}), {told['seconds_compile']:.1f} s compiling, "
        f"{told['seconds_total']:.1f} s in all, from the start of the command."
    )
    say(f"Recorded in {folder} (curve.png, metrics.jsonl, summary.json, model.safetensors).")


def promise(told: Mapping[str, Any]) -> None:
    """What clients are promised."""
    what = "SIMULATED, nobody is protected: " if told["simulated"] else ""
    say(
        f"Privacy: {what}epsilon {told['epsilon']:.3g} at delta {told['delta']:.2g} for {told['unit']} "
        f"({told['relation']}), if {'; '.join(told['rests_on'])}. Not covered: {told['not_covered']}."
    )


def _last(told: Mapping[str, Any]) -> None:
    """The metrics of the last model, beside those of the best."""
    test = told["test"]
    values = ", ".join(f"{name} {_number(test[name])}" for name in test["over_clients"])
    say(f"The last model, of round {told['rounds']:,}, on the same clients: {values}.")


def _past_best(told: Mapping[str, Any]) -> None:
    """Whether the validation clients were evaluated better before the end."""
    found = told.get("validation")
    if found and found["best"] != found["end"]:
        say(
            f"Validation {found['metric']}: best {_number(found['best'])} after round {found['round']:,}, and "
            f"{_number(found['end'])} at the end."
        )


def _metrics(told: Mapping[str, Any], of: str = "") -> None:
    table = Table(title=f"{told['algorithm']} on {told['task']}: {counted(told['rounds'], 'round')}{of}")
    table.add_column("metric", no_wrap=True)
    columns = ("test clients", "mean over clients", "5 % .. 95 % of clients")
    for column in (*columns, *(["best reachable"] if told["best"] else [])):
        table.add_column(column, justify="right")
    for name, spread in told["test"]["over_clients"].items():
        cells = (
            _number(told["test"][name]),
            _number(spread.get("mean")),
            f"{spread['p5']:.3f} .. {spread['p95']:.3f}" if "p5" in spread else "-",
            *([_number(told["best"].get(name))] if told["best"] else []),
        )
        table.add_row(name, *cells)
    out.print(table)
    _judged(told["test"]["judged"])
    _undefined(told["test"])


def _judged(how: Mapping[str, str]) -> None:
    local = "" if how["local"] == "none" else f" Local parameters: {how['local']}."
    others = "Other parameters" if local else "Parameters"
    split = f" Evaluated on the query set (evaluation_split: {how['split']})." if how.get("split") else ""
    mean = how["weights"] if how["weights"].startswith("by ") else f"over all {how['weights']}"
    say(
        f"Evaluated on {how['clients']} clients.{local} {others}: {how['others']}. First column: mean {mean}."
        f"{split}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _undefined(metrics: Mapping[str, Any]) -> None:
    for name, reason in metrics.get("undefined", {}).items():
        say(f"{name} has no value for these clients: {reason}.")


def warn_not_finite(names: Sequence[str], split: str) -> None:
    """Warn that a metric is not a number, so that nobody uses the model as if it were trained."""
    if names:
        from partwise.runs.summary import tell_not_finite

        say(f"Warning: {tell_not_finite(names, split)}")


def _left_out(told: Mapping[str, Any]) -> None:
    from partwise.runs.sanity import LEFT_OUT, tell_left_out, tell_unused

    unused = tell_unused(told["examples"])
    if unused:
        say(unused)
    words = tell_left_out({reason: told[reason] for reason in LEFT_OUT})
    if words:
        say(f"Left out over all rounds: {words}.")
    if told.get("outliers"):
        first = told["outliers"]["first"]
        say(
            f"{counted(told['outliers']['updates'], 'update')} out of all proportion to the others, the first by "
            f"client {', '.join(map(repr, first['clients']))} in round {first['round']:,} ({first['times']:,.0f} "
            f"times the usual norm); used all the same."
        )
    for name, (asked, there) in told["fewer"].items():
        say(f"The data have fewer than asked for: {name} = {there:,}, not {asked:,}.")


def _clients(test: Mapping[str, Any], noun: str = "test client") -> str:
    without = test["clients_without_examples"]
    more = f" ({without} without examples to test on)" if without else ""
    return f"{counted(test['clients'] + without, noun)}{more}"


def evaluation(result: Mapping[str, Any], title: str) -> None:
    """The metrics of a recorded run."""
    table = _table(["metric"], ["pooled", "mean over clients"])
    for name, spread in result["over_clients"].items():
        table.add_row(name, _number(result[name]), _number(spread.get("mean")))
    say(title)  # not as the table's title, which would break a path into lines
    out.print(table)
    _judged(result["judged"])
    _undefined(result)
    say(f"{_clients(result, 'client')}.")


def _table(words: Sequence[str], numbers: Sequence[str], **options: Any) -> Table:
    """A table with columns of words, then columns of numbers."""
    table = Table(**options)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def predictions(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """The model's outputs."""
    table = _table(["row", *keys], ["output"])
    for row in rows:
        table.add_row(str(row["row"]), *(str(row[name]) for name in keys), output_words(row["output"]))
    out.print(table)


def recommended(column: str, found: Sequence[Any]) -> None:
    """Items and their scores, the best first."""
    table = _table(["", column], ["score"])
    for place, each in enumerate(found, 1):
        table.add_row(str(place), str(each.id), f"{each.score:.4f}")
    out.print(table)


def output_words(output: Any) -> str:
    """An output in words: a number, or the first few numbers of a vector and its length. For a table of
    numbers, its shape."""
    while isinstance(output, list) and len(output) == 1:
        output = output[0]
    if not isinstance(output, list):
        return f"{output:.4f}" if isinstance(output, float) else str(output)
    if any(isinstance(each, list) for each in output):
        return f"{len(output)} x {len(output[0])} numbers (--json has them)"
    shown = " ".join(output_words(each) for each in output[:SHOWN])
    return shown if len(output) <= SHOWN else f"{shown} ... ({len(output)} numbers)"


def description(result: Mapping[str, Any]) -> None:
    """A task's parameters, clients and source."""
    title = f"{result['task']}, per client and round"
    table = _table(["path", "shape", "role"], ["bytes down", "bytes up"], title=title)
    for line in result["parameters"]:
        sizes = (f"{line['bytes_down']:,}", f"{line['bytes_up']:,}")
        table.add_row(line["path"], str(tuple(line["shape"])), line["role"], *sizes)
    out.print(table)
    for part, numbers in result["clients"].items():
        say(f"{part}: {counted(numbers['clients'], 'client')}, {counted(numbers['examples'], 'example')}")
    for name, value in result["source"].items():
        say(f"{name}: {_listed(value)}")


def _listed(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {each}" for name, each in value.items())
    return str(value)


def serving(result: Mapping[str, Any]) -> None:
    """The ways of serving slices side by side, and the best of them."""
    keys = ", ".join(counted(count, f"{space} key") for space, count in result["keys"].items())
    cohort, rounds = counted(result["cohort"], "client"), counted(result["rounds"], "round")
    title = f"{result['task']}: {keys}, {cohort} a round, {rounds} drawn"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)  # nine columns in 80 characters
    for column in SERVING_COLUMNS:
        table.add_column(column, justify="left" if column in ("way", "psi", "seen by") else "right")
    for line in result["lines"]:
        table.add_row(*_serving_cells(line))
    out.print(table)
    say(
        "Down and up per client and round, in all per round. Computed: slices by the server in a round; cached: "
        "share that a cache would answer; peak: slices computed while a cohort waits; seen by: who sees the keys."
    )
    say(_serving_words(result["best"]))


SERVING_COLUMNS = ("way", "psi", "kB down", "kB up", "MB in all", "computed", "cached", "peak", "seen by")


def _serving_cells(line: Mapping[str, Any]) -> list[str]:
    asked = line["way"] == "on_demand"
    return [
        line["way"],
        line["encoding"],
        *(f"{line[name] / 1e3:,.1f}" for name in ("down_per_client", "up_per_client")),
        f"{line['bytes_per_round'] / 1e6:,.2f}",
        f"{line['computed_per_round']:,.0f}",
        f"{line['cache_hit_rate']:.0%}" if asked else "-",
        f"{line['peak']:,}",
        line["keys_seen_by"].replace(", unless both servers tell each other", " *"),
    ]


def _serving_words(best: Mapping[str, Any]) -> str:
    ways: dict[str, list[str]] = {}
    for way, encoding in best["down"]:
        ways.setdefault(way, []).append(encoding)
    down = " and ".join(f"{way} ({', '.join(encodings)})" for way, encodings in ways.items())
    work = ", ".join(f"{way} {count:,.0f}" for way, count in best["work_per_round"].items())
    return (
        f"Fewest bytes down per client: {down}, {best['down_per_client'] / 1e3:,.1f} kB. Least work for the "
        f"server: {' and '.join(best['work'])} (slices computed a round, with a cache: {work}). Keys stay private "
        f"with {' and '.join(best['private'])} alone (* unless both servers tell each other)."
    )


HEAT_BAR = 40  # characters


def heat(result: Mapping[str, Any]) -> None:
    """For every key space, its numbers in a sentence, and its keys by the number of holders."""
    for each in result["spaces"]:
        title = f"{result['task']}, {result['split']} clients: key space '{each['space']}'"
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("holders" if each["by"] == "clients" else "samples of holders", justify="right")
        table.add_column("keys", justify="right")
        table.add_column("")
        most = max((line["keys"] for line in each["histogram"]), default=1)
        for line in each["histogram"]:
            low, high, keys = line["low"], line["high"], line["keys"]
            words = f"{low:,}" if low == high else f"{low:,} .. {high:,}"
            table.add_row(words, f"{keys:,}", "█" * -(-HEAT_BAR * keys // most))
        out.print(table)
        say(_heat_words(each))
    if result["uncounted"]:
        say(
            f"No column names the keys of {', '.join(result['uncounted'])}: any client may ask for any of them."
        )


def _heat_words(each: Mapping[str, Any]) -> str:
    held = (
        f"{each['keys_held']:,} of {counted(each['keys'], 'key')} {'is' if each['keys'] == 1 else 'are'} held"
    )
    by = counted(each["total"], each["by"].removesuffix("s"))
    if each["dispersion"] is None:
        return f"{by}; {held}."
    alone = f", {each['keys_with_one']:,} of them by one client alone" if each["by"] == "clients" else ""
    spread = ", ".join(f"{name[1:]} %: {value:,.0f}" for name, value in each["percentiles"].items())
    return (
        f"{by}; {held}{alone}. A key has from {each['n_min']:,} to {each['n_max']:,} "
        f"({spread}): dispersion {each['dispersion']:,.{0 if each['dispersion'] >= 100 else 2}f}."
    )
