"""The options of `partwise privacy`, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from partwise.cli import show
from partwise.types import counted


def show_options(result: Mapping[str, Any]) -> None:
    """The table of options, who sees what, and sentences about keys, noise and signals."""
    title = f"{result['task']}: cohorts of {result['cohort']:,} of {counted(result['clients'], 'client')}"
    table = Table(title=f"{title}, {counted(result['rounds'], 'round')}", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("option")
    for column in ("kB down", "kB up", "client ms", "servers s"):
        table.add_column(column, justify="right")
    for option in result["options"]:
        table.add_row(option["name"], *_cells(option))
    show.out.print(table)
    show.say("Who sees what of a client:")
    for option in result["options"]:
        sees = "; ".join(f"the {party}: {what}" for party, what in option["sees"].items())
        show.say(f"- {option['name']}: {sees}.".replace("the both", "both"))
    show.say(_cost_words(result["options"]))
    for each in result["left_out"]:
        show.say(f"Left out: {each['name']}: {each['why']}.")
    for crossing in result["crossings"]:
        show.say(_crossing_words(crossing, result["keys"][crossing["space"]]))
    if result["differential_privacy"]:
        show.say(_noise_words(result["differential_privacy"]))
    for signal in result["signals"]:
        show.say(_signal_words(signal))


def _cells(option: Mapping[str, Any]) -> list[str]:
    sizes = [f"{option[name] / 1e3:,.1f}" for name in ("bytes_down", "bytes_up")]
    if not option["seconds_client"] and not option["seconds_server"]:
        return [*sizes, "-", "-"]
    return [*sizes, f"{1e3 * option['seconds_client']:,.1f}", f"{option['seconds_server']:,.2f}"]


def _cost_words(options: list[Mapping[str, Any]]) -> str:
    how = "; ".join(
        f"{option['name']}: {option['measured']}" for option in options if option["seconds_client"]
    )
    if not how:
        return "Down and up: per client and round, the mean."
    return (
        "Down and up: per client and round; of plain sums the mean, of others what every client has. Times: what "
        "the cryptography of a round takes on a processor here, of a client, and of all servers for a cohort "
        f"({how})."
    )


def _crossing_words(crossing: Mapping[str, Any], keys: Mapping[str, Any]) -> str:
    most, up_to = crossing["most"], crossing["private_up_to"]
    here = f"Here it is {most:,} ({keys['bounded_by']}); a client has {keys['mean']:,.0f} on average."
    if not up_to:
        return f"Private retrieval of '{crossing['space']}' never has fewer bytes than its broadcast. {here}"
    return (
        f"Private retrieval of '{crossing['space']}' has fewer bytes than its broadcast if a client has at most "
        f"{up_to:,} of the {counted(crossing['keys'], 'key')}. {here}"
    )


def _noise_words(told: Mapping[str, Any]) -> str:
    needed = ", ".join(f"{each['noise']:.3g} for epsilon {each['epsilon']:g}" for each in told["needed"])
    spent = f"epsilon {told['epsilon']:.3g}" if told["epsilon"] is not None else "no finite epsilon"
    text = (
        f"Differential privacy adds noise to any option: with z = {told['noise']:.3g}, "
        f"{counted(told['rounds'], 'round')} cost {spent} at delta {told['delta']:.2g} "
        f"(cohort.sampling = {told['sampling']})."
    )
    if told["sampling"] != told["needed_sampling"] and told["needed_epsilon"] is not None:
        text += f" With {told['needed_sampling']}, they cost {told['needed_epsilon']:.3g}."
    return f"{text} It takes z = {needed} ({told['needed_sampling']})." if needed else text


def _signal_words(signal: Mapping[str, Any]) -> str:
    on_row, last = signal["clients_on_a_row"], signal["signal_to_noise"][-1]
    if last["median"] is None:
        return f"Without noise, a row of '{signal['space']}' has its whole signal."
    return (
        f"Signal to noise of a row of '{signal['space']}' in a round, at z = {last['noise']:.3g}: "
        f"{last['median']:.2g} for the median row ({on_row['median']:.3g} clients of a cohort), "
        f"{last['hottest']:.2g} for the hottest ({on_row['hottest']:.3g})."
    )
