"""``arbor info``, ``arbor list`` and ``arbor doctor``: models, names and this machine."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from arbor import components, registry
from arbor._version import __version__
from arbor.budget import Budget, Plan
from arbor.cli.build import build_solver
from arbor.cli.command import Command
from arbor.cli.options import output_options, preset_option
from arbor.cli.output import Output
from arbor.cli.record_options import SolverOptions, options_of, read_options
from arbor.errors import ArborError, ModelError
from arbor.feature import features
from arbor.run.limits import RunLimits
from arbor.run.request import TraceDetail
from arbor.support.cache_dir import cache_dir
from arbor.support.setting import settings_of
from arbor.support.texts import human_bytes

if TYPE_CHECKING:
    from rich.table import Table


# what works with the optional packages of 'arbor-search[NAME]', and these packages
EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "adapters": ("LoRA weights (adapter)", ("peft",)),
    "cuda": (
        "FlashInfer's attention on NVIDIA GPUs",
        ("flashinfer-python", "accelerate", "triton"),
    ),
    "gguf": ("models in GGUF files", ("gguf", "accelerate")),
    "hub": ("data sets of the Hub in arbor eval", ("datasets",)),
    "math": ("the grader math", ("math-verify",)),
    "parquet": ("Parquet files in arbor eval", ("pyarrow",)),
    "structured": ("formats of thoughts (step_format)", ("xgrammar",)),
    **{name: about for feature in features() for name, about in feature.extras.items()},
}
RATIOS = ("full", "0.75", "0.5", "0.25", "0.1")
KINDS = {registry.plural(kind): kind for kind in registry.KINDS}  # plural -> kind
MODELS = "models"
SETTINGS = "settings"
LIST_WIDTH = 100  # columns, also where stdout is not a terminal
PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "numpy",
    "networkx",
    "click",
    "rich",
    *dict.fromkeys(package for _, packages in EXTRAS.values() for package in packages),
)


# info


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Options of ``arbor info``, named as on the command line."""

    solver: SolverOptions


@click.command(cls=Command)
@click.argument("model", default="builtin:sapling")
@preset_option
@options_of(InfoOptions, without=("model",))
@output_options
@click.pass_obj
def info(output: Output, /, **values: Any) -> int:
    """Show a model's size and the memory at each budget; reads its config, not its weights.

    \b
      arbor info
      arbor info Qwen/Qwen2.5-7B-Instruct --max-depth 8 --step-tokens 128
      arbor info ./my-model --controller beam --json
    """
    options = read_options(InfoOptions, values).solver
    with build_solver(options, searches=False) as solver:
        model = solver.describe()
        plan: Plan | None = None
        note = model.reason
        if model.supported:
            try:
                plan = solver.plan()
            except ArborError as error:
                note = str(error)
    rows = [] if plan is None else _budgets(plan, str(options.settings.budget))
    if output.json:
        output.document(
            {
                "schema": "arbor.info/1",
                "model": model.to_dict(),
                "plan": None if plan is None else plan.to_dict(),
                "budgets": rows,
                "note": note,
            }
        )
        return 0 if model.supported else ModelError.exit_code
    for name, value in model.to_dict().items():
        if name == "weights_bytes":
            continue  # below, in words
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        output.print(f"{name.replace('_', ' '):<20}{'-' if value in (None, '') else shown}")
    if model.supported:
        output.print(f"{'memory of weights':<20}{human_bytes(model.weights_bytes)}")
    if note and not model.reason:
        output.print(f"{'note':<20}{note}")
    if plan is not None:
        shape = f"{plan.prompt_tokens:,} prompt + {plan.blocks:,} blocks of {plan.step_tokens:,}"
        output.print(
            f"{'search':<20}{options.components['task']}, {options.components['controller']}: {shape}"
        )
        output.print("")
        output.table(_budget_table(rows, plan))
    return 0 if model.supported else ModelError.exit_code


def _budgets(plan: Plan, asked: str) -> list[dict[str, Any]]:
    """Tokens and bytes of each budget, of the worst case where it is a ratio; and whether it
    works."""
    rows = []
    for form in dict.fromkeys([*RATIOS, str(Budget.parse(asked))]):
        budget = Budget.parse(form)
        tokens = budget.tokens(plan.full_tokens, plan.bytes_per_token)
        rows.append(
            {
                "budget": form,
                "tokens": tokens,
                "bytes": tokens * plan.bytes_per_token,
                "workable": budget.unit == "ratio" or tokens >= plan.smallest_tokens,
            }
        )
    return sorted(rows, key=lambda row: -row["tokens"])


def _budget_table(rows: list[dict[str, Any]], plan: Plan) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("--budget", "tokens at most", "KV", "workable"):
        table.add_column(name, justify="left" if name == "workable" else "right")
    for row in rows:
        least = f"no, the first thought needs {plan.smallest_tokens:,}"
        table.add_row(
            row["budget"],
            f"{row['tokens']:,}",
            human_bytes(row["bytes"]),
            "yes" if row["workable"] else least,
        )
    return table


# list


@click.command("list", cls=Command)
@click.argument(
    "kind", type=click.Choice([*KINDS, MODELS, SETTINGS]), required=False, metavar="[KIND]"
)
@output_options
@click.pass_obj
def list_(output: Output, kind: str | None) -> int:
    """List available names, with their settings and defaults; without KIND, all of them.

    KIND is one of controllers, verifiers, aggregates, tasks, policies, allocators, scorers,
    backends, models and settings, which --set takes.

    \b
      arbor list
      arbor list controllers
      arbor list tasks --json
    """
    chosen = [*KINDS, MODELS, SETTINGS] if kind is None else [kind]
    others = {MODELS: _models, SETTINGS: _settings}
    tables = {
        each: others[each]() if each in others else _components(KINDS[each]) for each in chosen
    }
    if output.json:
        output.document({"schema": "arbor.list/1", **tables})
        return 0
    width = min(LIST_WIDTH, shutil.get_terminal_size((LIST_WIDTH, 24)).columns)
    for number, (each, rows) in enumerate(tables.items()):
        if kind is None:
            output.print(f"{chr(10) if number else ''}{each}")
        for line in listed(rows, width, "" if kind else "  "):
            output.print(line)
    return 0


def listed(rows: list[dict[str, Any]], width: int, indent: str) -> Iterator[str]:
    """Names, each with its sentence and below that its settings, wrapped at words."""
    lengths = [len(row["name"]) for row in rows]
    column = max((each for each in lengths if each <= width // 3), default=0) + 2
    for row in rows:
        settings = row.get("settings", {}).items()
        # a setting stays on one line, spaces in its value too
        parts = [f"{name}={components.setting_text(value)}" for name, value in settings]
        joined = ", ".join(part.replace(" ", "\0") for part in parts)
        name = row["name"].ljust(column)
        if len(name) > column or not row["what"]:
            yield f"{indent}{name}".rstrip()
            name = " " * column
        for text in (row["what"], joined):
            lines = textwrap.wrap(
                text,
                width,
                initial_indent=f"{indent}{name}",
                subsequent_indent=" " * len(f"{indent}{name}"),
                break_long_words=False,
                break_on_hyphens=False,
            )
            yield from (line.replace("\0", " ") for line in lines)
            name = " " * column if lines else name


def _components(kind: str) -> list[dict[str, Any]]:
    rows = []
    for name in registry.names(kind):
        try:
            component = registry.resolve(kind, name)
        except ArborError as error:
            rows.append({"name": name, "what": str(error), "settings": {}})
            continue
        what = components.summary_of(component).replace("``", "`")
        settings = components.flat_defaults_of(component)
        rows.append({"name": name, "what": what, "settings": settings})
    return rows


def _models() -> list[dict[str, Any]]:
    """The built-in model and those in the Hugging Face cache."""
    cached = [{"name": name, "what": f"cached, {size}"} for name, size in cached_models()]
    return [{"name": "builtin:sapling", "what": "built in, offline"}, *cached]


def _settings() -> list[dict[str, Any]]:
    """The settings of a solver and of a run, and those that have an option as well."""
    known = SolverOptions.known() | settings_of(RunLimits) | settings_of(TraceDetail)
    return [
        {
            "name": each.name,
            "what": each.about.help,
            "settings": {"default": each.default},
            "option": each.about.shown != "set",
        }
        for each in sorted(known.values(), key=lambda each: each.name)
    ]


# doctor


@click.command(cls=Command)
@output_options
@click.pass_obj
def doctor(output: Output) -> int:
    """Show versions, devices and settings of this machine, for a bug report.

    \b
      arbor doctor
      arbor doctor --json
    """
    report = _report()
    if output.json:
        output.document({"schema": "arbor.doctor/1", **report})
        return 0
    for section, facts in report.items():
        if not isinstance(facts, dict):
            output.print(f"{section:<28}{facts}")
            continue
        for name, value in facts.items():
            shown = "-" if value in (None, "", []) else value
            output.print(f"{f'{section}.{name}':<28}{shown}")
    return 0


def _report() -> dict[str, Any]:
    import torch

    from arbor.kernels.native import native_state

    gpus = [
        f"{torch.cuda.get_device_name(i)}, "
        f"{human_bytes(torch.cuda.get_device_properties(i).total_memory)}, "
        f"sm{''.join(map(str, torch.cuda.get_device_capability(i)))}"
        for i in range(torch.cuda.device_count())
    ]
    return {
        "arbor": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "torch": {
            "cuda": torch.version.cuda,
            "gpus": gpus,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
        },
        "extras": extra_states(),
        "native": native_state(),
        "hub": {
            name: os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
        },
        "cache": str(cache_dir()),
        "names": {kind: list(registry.names(kind)) for kind in registry.KINDS},
        "plugins": {kind: registry.plugins(kind) for kind in registry.KINDS},
        "settings": {name: os.environ[name] for name in sorted(os.environ) if _is_setting(name)},
        "terminal": {
            "stdout": sys.stdout.isatty(),
            "stderr": sys.stderr.isatty(),
            "encoding": sys.stdout.encoding,
            "width": shutil.get_terminal_size().columns,
            "TERM": os.environ.get("TERM"),
        },
    }


def extra_states() -> dict[str, str]:
    """Each extra: ``installed``, or what it would add and the packages it lacks."""
    states = {}
    for name, (adds, packages) in sorted(EXTRAS.items()):
        missing = [each for each in packages if version_of(each) is None]
        lacks = f"adds {adds}; not installed: {', '.join(missing)}"
        states[name] = lacks if missing else f"installed: {adds}"
    return states


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_setting(variable: str) -> bool:
    """Whether an environment variable changes what arbor does; none of these holds a secret."""
    known = ("NO_COLOR", "FORCE_COLOR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    return variable.startswith("ARBOR_") or variable in known


MOST_NAMED = 8


def cached_models() -> list[tuple[str, str]]:
    """Name and size of every cached model, by name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda r: r.repo_id)
    return [(repo.repo_id, human_bytes(repo.size_on_disk)) for repo in models]


def with_models(error: ArborError) -> ArborError:
    """The same error, with the cached models."""
    names = [name for name, _ in cached_models()]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    cached = ", ".join(names[:MOST_NAMED]) + more if names else "none"
    hint = f"{error.hint} Cached models: {cached}."
    return ModelError(error.code, error.message, hint, **error.data, cached=names)
