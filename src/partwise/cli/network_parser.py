"""The options of the commands of a federation over a network."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from partwise.cli import network

Command = Callable[..., argparse.ArgumentParser]


def add_network(command: Command, add_task: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add them. `add_task` adds the options that say what is trained."""
    _add_deploy(command, add_task)
    _add_serve(command, add_task)
    _add_helper(command)
    _add_join(command)
    _add_enroll(command)


def _add_deploy(command: Command, add_task: Callable[[argparse.ArgumentParser], None]) -> None:
    more = (
        f": a server with TLS, and devices in processes of their own. A trial of {network.TRIAL_ROUNDS} rounds, "
        f"unless --rounds says more."
    )
    sub = command("deploy", network.deploy, "run a whole federation on this machine", more)
    add_task(sub)
    sub.add_argument("--devices", type=int, default=4, metavar="N", help="processes that have the clients")
    _add_engine(sub, "what carries the messages")
    sub.add_argument("--out", help="folder of the run (default: a new one under runs/)")
    sub.add_argument("--quiet", action="store_true", help="show no progress")


def _add_serve(command: Command, add_task: Callable[[argparse.ArgumentParser], None]) -> None:
    more = ". The run in --out goes on; if there is none, one is begun."
    sub = command("serve", network.serve, "serve a run to devices over a network", more)
    add_task(sub)
    sub.add_argument("--out", required=True, help="folder of the run")
    _add_listening(sub, 8443)
    _add_journal(
        sub, "where a new run has its journal (default: SQLite in --out); later, if there is a password"
    )
    sub.add_argument("--files", default="", metavar="URL", help="where devices find files of slices")
    sub.add_argument("--place", default="", metavar="DIR|s3://...", help="where files of slices are written")
    _add_engine(sub, "flower: write an app for `flwr run`, in place of serving")
    sub.add_argument("--until-end", action="store_true", help="stop when the run has ended")
    sub.add_argument("--helper", metavar="URL", help="the second server (privacy.sums=two_servers)")
    sub.add_argument("--helper-token", metavar="FILE", help="the token that its operator gave")
    sub.add_argument("--helper-authority", metavar="FILE", help="certificate that signed the helper's")
    _add_log(sub)


def _add_helper(command: Command) -> None:
    more = (
        ", of which neither sees a client's update or keys. Another operator than the first server's should run "
        "it. Its folder holds its keys, and what it has answered."
    )
    sub = command("helper", network.helper, "be the second of two servers", more)
    sub.add_argument("--out", default="partwise-helper", metavar="DIR", help="the helper's folder")
    _add_listening(sub, 8444)
    sub.add_argument(
        "--least", type=int, default=2, metavar="N", help="fewest reports of a sum that it answers"
    )
    _add_log(sub)


def _add_listening(sub: argparse.ArgumentParser, port: int) -> None:
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on (0.0.0.0: all)")
    sub.add_argument("--port", type=int, default=port, help="port to listen on; 0: any that is free")
    sub.add_argument("--certificate", metavar="FILE", help="PEM file of the server's certificate")
    sub.add_argument("--key", metavar="FILE", help="PEM file of its private key")
    sub.add_argument("--proxy", action="store_true", help="TLS ends at a proxy before this server")


def _add_engine(sub: argparse.ArgumentParser, told: str) -> None:
    sub.add_argument("--engine", choices=("http", "flower"), default="http", help=told)


def _add_join(command: Command) -> None:
    more = ". Examples and local parameters stay on this device."
    sub = command("join", network.join, "take part in a run with this device's own data", more)
    sub.add_argument("url", metavar="URL", help="the server: https://HOST:PORT; flower+https://HOST:PORT")
    sub.add_argument(
        "--data", required=True, help="CSV, Parquet or Arrow file, sqlite:FILE?table=T, or store:DIR"
    )
    sub.add_argument("--key", metavar="FILE", help="the device's key (`partwise enroll`)")
    sub.add_argument("--authority", metavar="FILE", help="certificate that signed the server's")
    sub.add_argument("--store", default="partwise-device", metavar="DIR", help="what the device keeps")
    sub.add_argument("--policy", default="", help="when to work: charging, unmetered, idle, or your function")
    sub.add_argument(
        "--helper-key", metavar="HEX", help="the key of the run's helper, as its operator told it"
    )
    sub.add_argument("--id", metavar="VALUE", help="the client, if the data does not name it, or has several")
    sub.add_argument("--most", type=int, default=1, metavar="N", help="clients to ask for work for at a time")
    _add_log(sub)


def _add_enroll(command: Command) -> None:
    sub = command("enroll", network.enroll, "let a device, or an operator, take part in a run")
    _add_where(sub)
    sub.add_argument("--key", metavar="FILE", help="the device's key; made if it is not there (device.pem)")
    sub.add_argument("--public", metavar="BASE64", help="a public key, in place of --key")
    sub.add_argument("--label", help="a name for the device")
    sub.add_argument("--days", type=float, default=365, help="after which the key expires")
    sub.add_argument("--operator", metavar="NAME", help="enroll an operator instead; writes NAME.token")
    sub = command("revoke", network.revoke, "let a device, or an operator, take part no longer")
    _add_where(sub)
    sub.add_argument("name", metavar="NAME", help="the device's id or label")


def _add_where(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("where", metavar="RUN|URL", help="folder of the run on its server, or the server's URL")
    sub.add_argument("--token", metavar="FILE", help="an operator's token, for a URL")
    sub.add_argument("--authority", metavar="FILE", help="certificate that signed the server's, for a URL")
    _add_journal(sub, "the URL of the run's journal, if it has a password")


def _add_journal(sub: argparse.ArgumentParser, told: str) -> None:
    sub.add_argument("--journal", metavar="URL", help=told)


def _add_log(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--log", choices=("text", "json"), default="text", help="how the log is written")
