"""``arbor serve``: an HTTP server in OpenAI's format, all requests in one engine."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arbor.budget import Budget
from arbor.cli.build import WORDS, build_solver
from arbor.cli.command import Command, Integer, Number, option, option_group
from arbor.cli.option_records import SolverOptions, read_options
from arbor.cli.options import (
    loading_options,
    max_expansions_option,
    output_options,
    policy_option,
    retention_options,
    sampling_options,
    search_shape_options,
    threads_option,
)
from arbor.cli.output import Output
from arbor.cli.signals import ending_at_once
from arbor.errors import UsageError
from arbor.support.units import human_bytes

if TYPE_CHECKING:
    from arbor.solver import Solver

SERVE_SCHEMA = "arbor.serve/1"
KEYS_VARIABLE = "ARBOR_API_KEYS"
AUTO = "auto"  # half of the free memory, at most a context for each request
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")

_options = option_group(
    option(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        heading="Server",
        common=True,
        help="Address to listen on; others than this machine's own need --api-keys.",
    ),
    option(
        "--port",
        type=Integer(0, 65_535),
        default=8000,
        metavar="N",
        heading="Server",
        common=True,
        help="Port to listen on; 0 takes a free one.",
    ),
    option(
        "--name",
        metavar="NAME",
        heading="Server",
        help="Name of the model in requests; default: the model's own.",
    ),
    option(
        "--api-keys",
        type=click.Path(path_type=Path),
        metavar="FILE",
        heading="Server",
        common=True,
        help=f"API keys, one a line; also in {KEYS_VARIABLE}, separated by commas.",
    ),
    option(
        "--concurrency",
        type=Integer(1, 1024),
        default=8,
        metavar="N",
        heading="Server",
        common=True,
        help="Requests in progress at a time.",
    ),
    option(
        "--queue",
        type=Integer(0),
        default=64,
        metavar="N",
        heading="Server",
        help="Requests that may wait; further ones are refused (429).",
    ),
    option(
        "--budget",
        default=AUTO,
        metavar="X",
        heading="Server",
        common=True,
        help="KV of all requests: 6GiB, or 0.25 of full retention; auto: a size.",
    ),
    option(
        "--max-tokens",
        type=Integer(1),
        default=1024,
        metavar="N",
        heading="Server",
        help="Most tokens of one choice.",
    ),
    option(
        "--max-search-tokens",
        type=Integer(1),
        default=16_384,
        metavar="N",
        heading="Server",
        help="Most tokens that one search generates.",
    ),
    option(
        "--timeout",
        type=Number(0, min_open=True),
        default=600.0,
        metavar="S",
        heading="Server",
        help="Most seconds of a request, its wait included.",
    ),
    option(
        "--body-bytes",
        type=Integer(1),
        default=2**20,
        metavar="N",
        heading="Server",
        help="Most bytes of a request's body.",
    ),
    option(
        "--drain",
        type=Number(0),
        default=10.0,
        metavar="S",
        heading="Server",
        help="Seconds that requests in progress get after Ctrl-C or SIGTERM.",
    ),
    option(
        "--live",
        is_flag=True,
        heading="Server",
        common=True,
        help="Show searches on a page, with the words of all requests.",
    ),
    search_shape_options,
    max_expansions_option,
    sampling_options,
    policy_option,
    retention_options,
    loading_options,
    threads_option,
    output_options,
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of ``arbor serve``, named as on the command line."""

    solver: SolverOptions
    bind: str
    port: int
    name: str | None
    api_keys: Path | None
    concurrency: int
    queue: int
    max_tokens: int
    max_search_tokens: int
    timeout: float
    body_bytes: int
    drain: float
    live: bool


@click.command(cls=Command)
@click.argument("model", default="builtin:sapling")
@_options
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> int:
    """Serve MODEL over HTTP in OpenAI's format; searches are an extra field of requests.

    MODEL is the built-in model, a directory, or a Hugging Face id.

    \b
      arbor serve
      arbor serve my-model --budget 1GiB --concurrency 16
      arbor serve --bind 0.0.0.0 --api-keys keys.txt
    """
    output = ctx.ensure_object(Output)
    if ctx.get_parameter_source("task") is click.core.ParameterSource.DEFAULT:
        values["task"] = "game24" if values["model"].startswith("builtin:") else WORDS
    budget = None if values["budget"] == AUTO else Budget.parse(values["budget"])
    is_part = budget is not None and budget.unit == "ratio"
    options = read_options(ServeOptions, values | {"budget": str(budget) if is_part else "full"})
    _check_packages()
    with ending_at_once():
        from arbor.server.app import make_app
        from arbor.server.service import Service
        from arbor.server.serving import LOCAL_HOSTS, Server, bound_socket, url_of
        from arbor.server.settings import ServerSettings, read_keys, served_name

    keys = read_keys(options.api_keys, os.environ.get(KEYS_VARIABLE))
    local = _is_local(options.bind)
    if not local and not keys:
        raise UsageError(
            "api-keys",
            f"--bind {options.bind} opens the server to other machines, and it has no API keys.",
            f"Give --api-keys FILE or {KEYS_VARIABLE}, or leave out --bind.",
        )
    settings = ServerSettings(
        name=options.name or served_name(options.solver.model),
        at_once=options.concurrency,
        queue=options.queue,
        max_tokens=options.max_tokens,
        max_search_tokens=options.max_search_tokens,
        timeout_s=options.timeout,
        body_bytes=options.body_bytes,
        drain_s=options.drain,
        api_keys=keys,
        live=options.live,
        hosts=LOCAL_HOSTS if local else (),
        **({} if (most := options.solver.max_expansions) is None else {"max_expansions": most}),
    )
    listening = bound_socket(options.bind, options.port)
    url = url_of(listening)
    with closing(listening), build_solver(options.solver) as solver:
        solver.load()
        tokens = None if is_part else _kv_tokens(budget, options.concurrency, solver)
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

        server = Server(
            make_app(service),
            settings.drain_s,
            ready=ready,
            draining=service.drain,
            verbose=output.verbose > 0,
        )
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:  # the signal that ended it, raised again when it has ended
            output.say("stopped")
        if server.force_exit:
            # a forward may still run, and its thread would abort an interpreter that ends
            sys.stdout.flush()
            os._exit(0)
    return 0


def _check_packages() -> None:
    """Refuses to start without the packages of the extra.

    Raises:
        UsageError: names those that are missing.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
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
    from arbor.memory.free_memory import free_bytes
    from arbor.run.shared_engine import default_tokens

    info = solver.describe()
    if size is None:
        free = free_bytes(solver.device)
        return default_tokens(info.context, concurrency, info.kv_bytes_per_token, free)
    return max(1, size.tokens(sys.maxsize, info.kv_bytes_per_token))
