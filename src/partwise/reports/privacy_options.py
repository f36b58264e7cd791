"""Which protection a task can have, who then sees what, and what it costs: `partwise privacy`.

Bytes are those of the library's own messages, without headers, per client and round. Seconds are measured here
(`reports.privacy_seconds`). Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from partwise.checkpoint import write_file
from partwise.privacy.buckets import layout_shape
from partwise.privacy.graphs import mask_settings
from partwise.privacy.masked_letters import letter_sizes
from partwise.privacy.retrieval import query_sizes
from partwise.privacy.sealing import OVERHEAD
from partwise.reports.masked_seconds import measure_masked
from partwise.reports.privacy_facts import PrivacyFacts, gather_facts
from partwise.reports.privacy_noise import settings_for_noise, tell_noise, tell_signals
from partwise.reports.privacy_picture import draw_options
from partwise.reports.privacy_seconds import Seconds, measure_two_servers
from partwise.runs.document import to_json
from partwise.runs.resolve import resolve
from partwise.selection.serving import Demand, serve
from partwise.server.sealed_form import sealed_shapes
from partwise.types import UserError

NO_KEYS = (
    "no parameter of this task is keyed, so there are no keys to hide (privacy.sums still hides updates)"
)
Traffic = tuple[float, float]  # bytes down and up, of a client in a round
NOTHING = Seconds(0.0, 0.0, "no cryptography")


class Option(NamedTuple):
    """A row of the table.

    sees:    party -> what it sees of a client
    traffic: facts -> bytes
    measure: facts -> seconds
    keyed:   whether it needs keys
    """

    name: str
    sums: str
    way: str
    sees: Mapping[str, str]
    traffic: Callable[[PrivacyFacts], Traffic]
    measure: Callable[[PrivacyFacts], Seconds]
    keyed: bool = False


def compare_options(
    name: str,
    data: str | None = None,
    changes: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """The content of `partwise privacy`, as a dict for JSON. With `out`, it is written there, with a picture."""
    task, config = resolve(name, data, changes or {})
    facts = gather_facts(task, config)
    told: dict[str, Any] = {"task": name, "algorithm": config.algorithm, "keys": facts.keys_told()}
    told["cohort"], told["clients"], told["rounds"] = facts.cohort, facts.population, config.rounds
    left_out: list[dict[str, str]] = []
    noise = _or_why(left_out, "differential privacy", lambda: tell_noise(facts))
    rows = [_or_why(left_out, each.name, partial(_row, each, facts, noise)) for each in OPTIONS]
    told["options"] = [row for row in rows if row is not None]
    told["left_out"] = left_out
    told["differential_privacy"] = noise
    told["signals"] = tell_signals(facts, noise)
    told["crossings"] = [tell_crossing(facts, space) for space in facts.agreement.tables]
    if out is not None:
        write_file(Path(out) / "privacy.json", to_json(told))
        draw_options(Path(out) / "privacy.png", told)
    return told


def _or_why(left_out: list[dict[str, str]], name: str, make: Callable[[], Any]) -> Any:
    """What is made; None, with the reason in the list, if it cannot be."""
    try:
        return make()
    except UserError as error:
        left_out.append({"name": name, "why": str(error)})
        return None


def _row(option: Option, facts: PrivacyFacts, noise: Mapping[str, Any] | None) -> dict[str, Any]:
    if option.keyed and not facts.partition.spaces:
        raise UserError(NO_KEYS)
    down, up = option.traffic(facts)
    seconds = option.measure(facts)
    return {
        "name": option.name,
        "sees": _seen(option, facts),
        "bytes_down": down,
        "bytes_up": up,
        "seconds_client": seconds.client,
        "seconds_server": seconds.server,
        "measured": seconds.how,
        "epsilon": noise["epsilon"] if noise else None,
        "settings": _settings(option, facts),
    }


def _seen(option: Option, facts: PrivacyFacts) -> dict[str, str]:
    """Who sees what of a client, with the settings that the task has."""
    sees = dict(option.sees)
    if option.sums == "masked" and facts.config.privacy.mechanism == "skellam":
        sees["server"] = "nothing but the sum of a round, with the noise of its clients"
    if facts.partition.spaces:
        return sees
    return {party: what.partition(";")[0] for party, what in sees.items()}  # after it is what is said of keys


def _settings(option: Option, facts: PrivacyFacts) -> dict[str, Any]:
    """The settings of an option."""
    settings: dict[str, Any] = {"privacy.sums": option.sums, "serving.way": option.way}
    if option.sums == "plain":
        return settings
    settings |= {"privacy.clip": facts.config.privacy.clip or 1.0, **settings_for_noise(facts.config)}
    if facts.config.privacy.mechanism == "skellam":
        settings["privacy.mechanism"] = "skellam" if option.sums == "masked" else "independent"
    if option.way == "private":
        settings["privacy.keys"] = max(form.most for form in facts.agreement.tables.values())
    return settings


def _plain(way: str) -> Callable[[PrivacyFacts], Traffic]:
    """Means over clients."""

    def traffic(facts: PrivacyFacts) -> Traffic:
        clients = max((len(each) for each in facts.counts.values()), default=1)
        demands = {space: Demand(0, counts) for space, counts in facts.counts.items()}
        served = serve(facts.sizes, clients, demands)[way]
        return served.bytes_down / clients, served.bytes_up / clients

    return traffic


def _masked(facts: PrivacyFacts) -> Traffic:
    """The whole model down, and all of its words up, with the letters of both directions."""
    settings = mask_settings(facts.cohort, b"")
    letters = letter_sizes(settings.degree, facts.num_words)
    down, _ = _plain("broadcast")(facts)
    return down + sum(letters.down.values()), float(sum(letters.up.values()))


def _two_servers(facts: PrivacyFacts) -> Traffic:
    """Every client's messages have these sizes."""
    shapes, sizes = sealed_shapes(facts.agreement).values(), facts.sizes
    report = sum(each.size * each.dtype.itemsize for each in shapes)
    asked = sizes.seeds + sizes.to_both + sizes.sealed
    return float(sizes.fixed + sizes.answer), float(asked + report)


OPTIONS = (
    Option(
        "plain sums, on demand",
        "plain",
        "on_demand",
        {"server": "every client's update and keys"},
        _plain("on_demand"),
        lambda facts: NOTHING,
        keyed=True,
    ),
    Option(
        "plain sums, broadcast",
        "plain",
        "broadcast",
        {"server": "every client's update; the rows in it tell the keys"},
        _plain("broadcast"),
        lambda facts: NOTHING,
    ),
    Option(
        "masked sums, broadcast",
        "masked",
        "broadcast",
        {"server": "nothing but the sum of a round, before its noise", "other clients": "nothing"},
        _masked,
        lambda facts: measure_masked(facts.cohort, facts.num_words),
    ),
    Option(
        "two servers, private retrieval",
        "two_servers",
        "private",
        {
            "server": "nothing but the sum of a round, with its noise",
            "helper": "nothing alone",
            "both together": "everything",
        },
        _two_servers,
        lambda facts: measure_two_servers(facts.agreement, facts.cohort),
        keyed=True,
    ),
)


def retrieval_bytes(num_keys: int, most: int, row_bytes: int) -> int:
    """Bytes of the questions and the joined answer for one space, for clients with up to `most` keys."""
    return query_sizes(layout_shape(num_keys, most), row_bytes).relayed + OVERHEAD


def tell_crossing(facts: PrivacyFacts, space: str) -> dict[str, Any]:
    """Up to how many keys of a client private retrieval has fewer bytes than to broadcast the table; 0 if it never
    has."""
    form = facts.agreement.tables[space]
    table = form.num_keys * facts.sizes.values[space]
    fewer = lambda most: retrieval_bytes(form.num_keys, most, form.row_bytes) < table
    low, high = 0, form.num_keys + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fewer(middle) else (low, middle)
    some = {min(form.num_keys, round(2 ** (step / 4))) for step in range(4 * 24)}
    some |= {most for most in (low, high) if 0 < most <= form.num_keys}
    return {
        "space": space,
        "keys": form.num_keys,
        "most": form.most,
        "broadcast": table,
        "private_up_to": low,
        "curve": [
            {"most": most, "bytes": retrieval_bytes(form.num_keys, most, form.row_bytes)}
            for most in sorted(some)
        ],
    }
