"""Partwise as a Flower app: what `flwr run` starts at a SuperLink, and what stock SuperNodes start for a message.

The app that is sent to the SuperLink has two lines: `from partwise.deployment.flower_app import client, server`.
docs/flower.md has its configuration.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from partwise.deployment.agent import run_agent
from partwise.deployment.federation import open_run
from partwise.deployment.flower_hub import FlowerHub
from partwise.deployment.flower_letters import Letter, Reply, read_letter, write_reply
from partwise.deployment.flower_link import FlowerLink
from partwise.deployment.jobs import Wait
from partwise.deployment.serve import log_to_stderr
from partwise.types import UserError

server, client = ServerApp(), ClientApp()


@server.main()
def serve_run(grid: Grid, context: Context) -> None:
    """Serve the run in the folder that the run's configuration names."""
    given = _given(context.run_config, "run", ("out", "journal", "files", "place"))
    if "out" not in given:
        raise UserError("say which run is served: `flwr run ... --run-config 'out=\"/path/of/the/run\"'`")
    log_to_stderr(False)
    opened = open_run(given["out"], given.get("journal"), given.get("files", ""), given.get("place", ""))
    try:
        FlowerHub(opened, grid).run()
    finally:
        opened.hub.close()


@client.train()
def work(message: Message, context: Context) -> Message:
    """One letter at a SuperNode, in a process of its own. The node's configuration says where its data is."""
    given = _given(context.node_config, "node", ("data", "store", "policy", "id", "most"))
    if "data" not in given or "store" not in given:
        raise UserError(
            "say where this node's data is, and where it keeps its own: `flower-supernode ... --node-config "
            '\'data="/path/ratings.csv" store="/path/own"\'`'
        )
    mail = OneLetter(read_letter(message.content))
    link = FlowerLink(mail)
    policy, id, most = str(given.get("policy", "")), given.get("id"), int(given.get("most", 1))
    for _ in run_agent(link, str(given["data"]), str(given["store"]), policy, id and str(id), most):
        pass
    link.close()
    return Message(write_reply(mail.reply), reply_to=message)


class OneLetter:
    """`deployment.flower_link.Mail` of one letter."""

    def __init__(self, letter: Letter):
        self._letter: Letter | None = letter
        self.reply = Reply()

    def take(self) -> Letter | Wait:
        """As `Mail.take`."""
        letter, self._letter = self._letter, None
        return letter or Wait(0.0, ended=True)

    def answer(self, reply: Reply) -> None:
        """As `Mail.answer`."""
        self.reply = reply


def _given(config: Any, of: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What is set of a configuration, which must have no other names."""
    unknown = set(config) - {*names, "partition-id", "num-partitions"}  # the last two are Flower's own
    if unknown:
        raise UserError(
            f"the {of}'s configuration has {', '.join(sorted(unknown))}: it may have {', '.join(names)}"
        )
    return {name: value for name, value in config.items() if value != ""}
