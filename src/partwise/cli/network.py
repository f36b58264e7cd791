"""The commands of a federation over a network: serve, enroll, revoke, join, deploy. Each returns what --json
prints."""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from partwise.cli import show
from partwise.cli.interrupt import begin_work
from partwise.cli.operator_requests import as_operator, is_url
from partwise.cli.progress import show_progress
from partwise.types import UserError, counted

Options = argparse.Namespace
Result = Mapping[str, Any]
DAY, MOST_DAYS = 86_400, 36_500
TRIAL_ROUNDS = 20  # of `partwise deploy`, if nobody says how many
EXTRAS = {  # package -> the extra that brings it
    **dict.fromkeys(
        (
            "cryptography",
            "prometheus_client",
            "psutil",
            "sqlalchemy",
            "starlette",
            "urllib3",
            "uvicorn",
            "zstandard",
        ),
        "deploy",
    ),
    **dict.fromkeys(("flwr", "httpx"), "flower"),
    "psycopg": "postgres",
}


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """For commands that need an extra: say which one, if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        raise UserError(
            f"this needs the package {name}, which is not installed: pip install 'partwise[{EXTRAS[name]}]'"
        ) from None


@needed()
def serve(options: Options) -> Result:
    """`partwise serve`."""
    from partwise.cli.commands import asked
    from partwise.deployment.federation import found_run
    from partwise.deployment.helper_link import HelperDownError
    from partwise.deployment.journal import JournalDownError
    from partwise.deployment.serve import Serving, log_to_stderr, serve
    from partwise.runs.folder import Folder
    from partwise.runs.resolve import resolve

    names = ("host", "port", "certificate", "key", "proxy", "journal", "files", "place", "until_end")
    names += ("helper", "helper_token", "helper_authority")
    how = Serving(**{name: getattr(options, name) for name in names})
    if options.engine == "http":
        how.check()  # before anything is written
    if not Folder(options.out).exists():
        task, recorded, changes = asked(options)
        if task is None:
            raise UserError(
                f"'{options.out}' holds no run yet: say what is to be trained, as in `partwise serve planted`"
            )
        found_run(
            *resolve(task, options.data, changes, options.preset, recorded), options.out, options.journal
        )
    elif options.task or options.set or options.config:
        raise UserError(
            f"'{options.out}' holds a run already, which keeps its settings: leave out the task and --set, or "
            f"choose another folder with --out"
        )
    if options.engine == "flower":
        return _app_for_flower(options)
    log_to_stderr(options.log == "json")
    begin_work()
    try:
        hub = serve(options.out, how, lambda url: show.say(url))
    except HelperDownError as error:
        raise UserError(f"{error}: start it first (`partwise helper`)") from None
    try:
        row = hub.round()
    except JournalDownError as error:
        raise UserError(f"{error}. The run goes on when the server is started again") from None
    finally:
        hub.close()
    return {"folder": options.out, "version": row.number, "phase": row.phase}


def _app_for_flower(options: Options) -> Result:
    """Write the app that serves a run at a SuperLink."""
    from partwise.deployment.flower_trial import write_app

    given = {name: getattr(options, name) for name in ("journal", "files", "place")}
    app = write_app(Path(options.out), **given)
    told = f"The run is served at a SuperLink by: flwr run {app} --stream"
    return _said(options, told, {"folder": options.out, "app": str(app)})


@needed()
def helper(options: Options) -> Result:
    """`partwise helper`."""
    from partwise.deployment.helper import Helper
    from partwise.deployment.serve import Serving, log_to_stderr, serve_helper

    names = ("host", "port", "certificate", "key", "proxy")
    how = Serving(**{name: getattr(options, name) for name in names}).check()
    if options.least < 1:
        raise UserError(f"--least is {options.least}: a sum is of 1 report or more, and should be of many")
    log_to_stderr(options.log == "json")
    desk = Helper(options.out, options.least)
    show.say(f"The helper's key, for devices: {desk.public.hex()}")
    begin_work()
    serve_helper(desk, how, lambda url: show.say(url))
    return {"folder": options.out, "key": desk.public.hex()}


@needed()
def enroll(options: Options) -> Result:
    """`partwise enroll`."""
    from partwise.checkpoint import write_file
    from partwise.deployment.auth import DeviceKey, KeyRow, device_of, new_token

    if not 0 < options.days <= MOST_DAYS:
        raise UserError(f"--days must be more than 0 and at most {MOST_DAYS:,}, not {options.days:g}")
    expires = time.time() + options.days * DAY
    if options.operator:
        token, row = new_token(options.operator)
        path = _unused(options.key or f"{options.operator}.token")
        _change(options, lambda ring: ring.enroll(row._replace(expires=expires)), None)
        write_file(path, token.encode(), mode=0o600)
        told = f"Operator {options.operator} may log in with the token in {path}."
        return _said(options, told, {"operator": options.operator, "token": str(path)})
    if options.public:
        public = _public(options.public)
    else:
        path = Path(options.key or "device.pem")
        if not path.exists():
            DeviceKey.new().save(path)
        public = DeviceKey.load(path).public
    row = KeyRow(device_of(public), public, options.label or "", expires)
    body = {"public": base64.b64encode(public).decode(), "label": row.label, "days": options.days}
    _change(options, lambda ring: ring.enroll(row), ("/v1/operator/enroll", body))
    return _said(
        options, f"Device {row.device} may take part for {options.days:g} days.", {"device": row.device}
    )


@needed()
def revoke(options: Options) -> Result:
    """`partwise revoke`."""
    _change(options, lambda ring: ring.revoke(options.name), ("/v1/operator/revoke", {"name": options.name}))
    return _said(options, f"'{options.name}' may not take part any more.", {"revoked": options.name})


@needed()
def join(options: Options) -> Result:
    """`partwise join`."""
    from partwise.deployment.agent import run_agent
    from partwise.deployment.serve import log_to_stderr

    accepted = refused = 0
    with _link(options) as link:
        log_to_stderr(options.log == "json")
        given = (link, options.data, options.store, options.policy, options.id, options.most)
        for done in run_agent(*given, helper_key=options.helper_key):
            accepted, refused = accepted + done.accepted, refused + (not done.accepted)
    told = (
        f"{counted(accepted, 'report')} accepted, {refused} not; {link.bytes_down:,} bytes down, "
        f"{link.bytes_up:,} up."
    )
    counts = {
        "accepted": accepted,
        "refused": refused,
        "bytes_down": link.bytes_down,
        "bytes_up": link.bytes_up,
    }
    return _said(options, told, counts)


@contextlib.contextmanager
def _link(options: Options) -> Iterator[Any]:
    """The way to the run: over HTTP, or through Flower."""
    if options.url.startswith("flower"):
        from partwise.deployment.flower_link import FlowerLink
        from partwise.deployment.flower_node import node_at

        with node_at(options.url, options.authority, options.key) as mail:
            link = FlowerLink(mail, options.authority)
            yield link
            link.close()
        return
    from partwise.deployment.auth import DeviceKey
    from partwise.deployment.http_link import HttpLink

    if not options.key:
        raise UserError("give this device's key: --key FILE (`partwise enroll` makes one)")
    yield HttpLink(options.url, DeviceKey.load(options.key), options.authority)


def kept_model(run: str) -> Path:
    """The folder of a run; of a URL, the folder with the model that was fetched from there."""
    if not is_url(run):
        return Path(run)
    from partwise.deployment.fetch import place_of

    if not (place_of(run) / "config.toml").exists():
        raise UserError(f"no model was fetched from {run} yet: `partwise personalize {run} ...` does it")
    return place_of(run)


@needed()
def refreshed(options: Options) -> Path:
    """The folder of a run; of a URL, after fetching the newest version of its model, if the server answers."""
    if not is_url(options.run_folder):
        return Path(options.run_folder)
    from partwise.deployment.auth import DeviceKey
    from partwise.deployment.fetch import fetch_run, place_of
    from partwise.deployment.http_link import HttpLink
    from partwise.deployment.link import UnreachableError

    if not options.key:
        raise UserError(
            "to fetch a model from a server, give this device's key: --key FILE (`partwise enroll`)"
        )
    place = place_of(options.run_folder)
    try:
        link = HttpLink(options.run_folder, DeviceKey.load(options.key), options.authority)
        _, version = fetch_run(link, place)
        if not options.json:
            show.say(f"Fetched version {version} of the model into {place}.", show.err)
    except UnreachableError as error:
        if not (place / "config.toml").exists():
            raise UserError(
                f"{error}, and there is no model of it on this device yet: try again later"
            ) from None
        show.say(f"{error}. Going on with the model that was fetched before.", show.err)
    return place


@needed()
def deploy(options: Options) -> Result:
    """`partwise deploy`."""
    from partwise.cli.commands import asked, free_folder
    from partwise.config.protection import protection
    from partwise.deployment.trial import run_trial
    from partwise.runs.evaluation import evaluate_run
    from partwise.runs.folder import Folder
    from partwise.runs.resolve import resolve
    from partwise.runs.train import Status
    from partwise.simulation.mesh import use_all_cores

    use_all_cores()
    if options.out is not None and Folder(options.out).exists():
        raise UserError(f"'{options.out}' holds a run already: choose another folder with --out")
    name, recorded, changes = asked(options)
    changes.setdefault("rounds", _trial_rounds(changes))
    engine, told = _engine(options.engine)
    if options.engine == "flower":
        changes.setdefault("serving.way", "broadcast")
        if changes["serving.way"] != "broadcast":
            raise UserError(
                f"serving.way = {changes['serving.way']} is not for --engine flower, whose letters have the "
                f"slices: set it to broadcast, or leave it out"
            )
    task, config = resolve(name or "planted", options.data, changes, options.preset, recorded)
    if "deploy.population" not in changes and config.privacy.clip is None:  # else it is part of the promise
        config = config.changed({"deploy.population": task.train.num_clients})
    out = free_folder(task.name, changes) if options.out is None else Path(options.out)
    begin_work()
    began = time.perf_counter()
    with show_progress(options, task.name) as progress:
        show_round = lambda far: progress(
            Status(far.round, config.rounds, far.records[-1]["loss"] or float("nan"), None)
        )
        folder = run_trial(task, config, out, options.devices, show_round, progress, engine)
        trained = time.perf_counter() - began
        progress("evaluating")
    result = evaluate_run(out, data=options.data)
    records, config = folder.records(), folder.config()
    promised = protection(config, config.deploy.population)
    summary = {
        "task": task.name,
        "algorithm": config.algorithm,
        "rounds": config.rounds,
        "devices": options.devices,
        "reports": None if promised else sum(record["reports"] for record in records),
        "seconds": trained,
        "test": result,
        "privacy": promised and promised.promise(config.rounds),
        "folder": str(out),
    }
    if not options.json:
        show.evaluation(
            result, f"{config.algorithm} on {task.name}: {counted(config.rounds, 'round')}, test clients"
        )
        if promised:
            show.promise(summary["privacy"])
        sent = "reported" if promised else f"sent {counted(summary['reports'], 'report')}"
        show.say(
            f"{counted(options.devices, 'device')} {sent} {told} in "
            f"{trained:.1f} s, from the start of the processes to their end. Their logs and the model are in {out}."
        )
    return summary


def _trial_rounds(changes: Mapping[str, Any]) -> int:
    """How many rounds a trial has, if nobody says: as many as the algorithm needs, if it says that."""
    from partwise.algorithms.registry import find_algorithm

    own = find_algorithm(changes["algorithm"]).defaults if "algorithm" in changes else {}
    return own.get("rounds", TRIAL_ROUNDS)


def _engine(name: str) -> tuple[Any, str]:
    """What starts the processes of a trial, and the words for it."""
    if name == "flower":
        from partwise.deployment.flower_trial import through_flower

        importlib.import_module("flwr")  # that it is missing is said before anything is written
        return through_flower, "through a SuperLink of Flower, over TLS,"
    from partwise.deployment.trial import over_http

    return over_http, "over TLS"


def _change(
    options: Options, here: Callable[[Any], Any], there: tuple[str, Mapping[str, Any]] | None
) -> None:
    """Change the keys of a run: in its journal on this host, or at its server with an operator's token."""
    if not is_url(options.where):
        from partwise.deployment.journal_place import journal_of
        from partwise.deployment.key_ring import KeyRing
        from partwise.runs.folder import Folder

        folder = Folder(options.where)
        folder.config()  # that there is one
        with contextlib.closing(journal_of(folder, options.journal)) as journal:
            here(KeyRing(journal))
        return
    if there is None:
        raise UserError("operators are enrolled on the server's host: give the folder of the run, not a URL")
    _post(options, *there)


def _post(options: Options, path: str, body: Mapping[str, Any]) -> None:
    request = as_operator(options.where, options.token, options.authority)
    request("POST", path, json.dumps(dict(body)).encode())


def _public(text: str) -> bytes:
    try:
        public = base64.b64decode(text, validate=True)
    except ValueError:
        public = b""
    if len(public) != 32:
        raise UserError(f"--public must be the 32 bytes of an Ed25519 public key in base64, not '{text}'")
    return public


def _unused(path: str) -> Path:
    if Path(path).exists():
        raise UserError(f"'{path}' is there already: choose another name with --key")
    return Path(path)


def _said(options: Options, text: str, result: Result) -> Result:
    if not options.json:
        show.say(text)
    return result
