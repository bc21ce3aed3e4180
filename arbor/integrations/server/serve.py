"""``arbor serve``: an HTTP server in OpenAI's format, all requests in one engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import os
import signal
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arbor.budget import Budget
from arbor.cli.build import WORDS, build_solver
from arbor.cli.command import Command, option
from arbor.cli.options import output_options, preset_option
from arbor.cli.output import Output
from arbor.cli.record_options import SolverOptions, options_of, read_options
from arbor.cli.signals import EXIT_SIGNAL
from arbor.errors import UsageError
from arbor.integrations.server import FEATURE
from arbor.integrations.server.settings import (
    ServerLimits,
    ServerSettings,
    read_keys,
    served_name,
)
from arbor.support.setting import setting
from arbor.support.texts import human_bytes

if TYPE_CHECKING:
    from arbor.solver import Solver

SERVE_SCHEMA = "arbor.serve/1"
KEYS_VARIABLE = "ARBOR_API_KEYS"
AUTO = "auto"  # half of the free memory, at most a context for each request


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of ``arbor serve``, named as on the command line."""

    HEADING = "Server"

    bind: str = setting(
        "127.0.0.1",
        "Address to listen on; others than this machine's own need --api-keys.",
        shown="short",
        metavar="ADDRESS",
    )
    port: int = setting(
        8000, "Port to listen on; 0 takes a free one.", shown="short", least=0, most=65_535
    )
    name: str | None = setting(
        None, "Name of the model in requests; default: the model's own.", metavar="NAME"
    )
    api_keys: Path | None = setting(
        None, f"API keys, one a line; also in {KEYS_VARIABLE}, separated by commas.", shown="short"
    )
    limits: ServerLimits
    solver: SolverOptions


@click.command(cls=Command)
@click.argument("model", default="builtin:sapling")
@preset_option
@options_of(ServeOptions, without=("model", "budget"), task=None)
@option(
    "--budget",
    default=AUTO,
    metavar="X",
    heading="Server",
    common=True,
    help="KV of all requests: 6GiB, or 0.25 of full retention; auto: a size.",
)
@output_options
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> int:
    """Serve MODEL over HTTP in OpenAI's format; searches are an extra field of requests.

    MODEL is the built-in model, a directory, or a Hugging Face id. Without --task searches are of
    'reasoning', those of the built-in model of 'game24'.

    \b
      arbor serve
      arbor serve my-model --budget 1GiB --concurrency 16
      arbor serve --bind 0.0.0.0 --api-keys keys.txt
    """
    output = ctx.ensure_object(Output)
    if values["task"] is None:
        values["task"] = "game24" if values["model"].startswith("builtin:") else WORDS
    budget = None if values["budget"] == AUTO else Budget.parse(values["budget"])
    is_part = budget is not None and budget.unit == "ratio"
    options = read_options(ServeOptions, values | {"budget": str(budget) if is_part else "full"})
    _check_packages()
    from arbor.integrations.server.app import LOCAL_HOSTS, Server, bound_socket, url_of
    from arbor.integrations.server.search_changes import check_size
    from arbor.integrations.server.service import Service

    keys = read_keys(options.api_keys, os.environ.get(KEYS_VARIABLE))
    local = _is_local(options.bind)
    if not local and not keys:
        raise UsageError(
            "api-keys",
            f"--bind {options.bind} opens the server to other machines, and it has no API keys.",
            f"Give --api-keys FILE or {KEYS_VARIABLE}, or leave out --bind.",
        )
    settings = ServerSettings(
        **dataclasses.asdict(options.limits),
        name=options.name or served_name(options.solver.settings.model),
        max_expansions=options.solver.settings.max_expansions or ServerSettings.max_expansions,
        api_keys=keys,
        hosts=LOCAL_HOSTS if local else (),
    )
    listening = bound_socket(options.bind, options.port)
    url = url_of(listening)
    with closing(listening), build_solver(options.solver) as solver:
        setup = solver.setup
        check_size(setup.controller, setup.boundary.max_depth, settings.max_expansions, settings)
        solver.load()
        tokens = None if is_part else _kv_tokens(budget, settings.concurrency, solver)
        service = Service(solver, tokens, settings)

        def ready() -> None:
            if output.json:
                output.document({"schema": SERVE_SCHEMA, "url": url, "model": settings.name})
            elif not output.quiet:
                kv = f"budget {budget}"
                if tokens is not None:
                    size = tokens * solver.describe().kv_bytes_per_token
                    kv = f"{tokens:,} tokens of KV ({human_bytes(size)})"
                output.print(f"serving {settings.name} at {url}/v1 · {kv}")

        server = Server(service, ready, output.verbose > 0)
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:  # the signal that ended it, raised again when it has ended
            output.say("stopped")
        if service.lost is not None:
            raise service.lost
        if server.force_exit:
            # a forward may still run, and its thread would abort an interpreter that ends
            sys.stdout.flush()
            os._exit(EXIT_SIGNAL + signal.SIGINT)
    return 0


def _check_packages() -> None:
    """Refuses to start without the packages of the extra."""
    packages = FEATURE.extras["server"][1]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            "server-packages",
            f"the server needs {', '.join(missing)}.",
            "Install them: pip install 'arbor-search[server]'.",
        )


def _is_local(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _kv_tokens(size: Budget | None, concurrency: int, solver: Solver) -> int:
    """Tokens of KV for all requests; read after the weights are loaded."""
    from arbor.memory.out_of_memory import free_bytes
    from arbor.run.worker import default_tokens

    info = solver.describe()
    if size is None:
        free = free_bytes(solver.device)
        return default_tokens(info.context, concurrency, info.kv_bytes_per_token, free)
    return max(1, size.tokens(sys.maxsize, info.kv_bytes_per_token))
