"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from arbor import registry
from arbor.cli.command import GENERAL, Integer, Number, option, option_group
from arbor.cli.configure import take_defaults, take_preset
from arbor.cli.output import LOG_LEVELS, LOG_SETTINGS, Output, configure_log
from arbor.events import Detail
from arbor.model.names import KV_DTYPES, WEIGHTS
from arbor.run.presets import PRESETS

EXIT_GATE = 7  # a check or a gate failed
# commands validate the path themselves (exit code 4)
TRACE_PATH = click.Path(path_type=Path, readable=False)
COMPLETION = "_ARBOR_COMPLETE"  # set by the shell that asks for completions


def _set_output(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Stores a given setting; one after the command wins over one before it."""
    name = parameter.name or ""
    output = ctx.ensure_object(Output)
    if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
        setattr(output, name, value)
        if name in LOG_SETTINGS:
            configure_log(output)


def names_of(kind: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A completer for the names of a kind, plugins included; imports none of them."""

    def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        return [name for name in registry.names(kind) if name.startswith(begun)]

    return complete


_OUTPUT_OPTION: dict[str, Any] = {
    "heading": GENERAL,
    "expose_value": False,
    "callback": _set_output,
}

output_options = option_group(
    option(
        "--json",
        is_flag=True,
        common=True,
        help="Print one JSON document on stdout.",
        **_OUTPUT_OPTION,
    ),
    option(
        "-q",
        "--quiet",
        is_flag=True,
        common=True,
        help="Print only the result and errors.",
        **_OUTPUT_OPTION,
    ),
    option(
        "-v",
        "--verbose",
        count=True,
        help="Print more on stderr; -vv prints everything.",
        **_OUTPUT_OPTION,
    ),
    option(
        "--display",
        type=click.Choice(["auto", "live", "plain", "none"]),
        default="auto",
        help="Progress on stderr; auto: live on a terminal, else a line every 30 s.",
        **_OUTPUT_OPTION,
    ),
    option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        help="Colors; auto follows the terminal, NO_COLOR and FORCE_COLOR.",
        **_OUTPUT_OPTION,
    ),
    option(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        help="Least severe log messages shown; warning without -q and -v.",
        **_OUTPUT_OPTION,
    ),
    option(
        "--log-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Append the whole log to FILE, one JSON object per line.",
        **_OUTPUT_OPTION,
    ),
    option(
        "--debug", is_flag=True, help="Print Python's traceback with every error.", **_OUTPUT_OPTION
    ),
)

revision_option = option(
    "--revision",
    metavar="NAME",
    heading="Model",
    help="Branch, tag or commit on the Hub; default: the main branch.",
)
adapter_option = option(
    "--adapter",
    metavar="DIR",
    heading="Model",
    help="LoRA weights of peft, a directory or Hub id, merged when it loads.",
)
trust_option = option(
    "--trust-remote-code",
    is_flag=True,
    heading="Model",
    help="Run Python code shipped with the model; only if you have read it.",
)

# `arbor bench` has its own --budget and --policy.

preset_option = option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    heading="Search",
    is_eager=True,
    expose_value=False,
    callback=take_preset,
    help="A paper's search; other options win.",
)

task_option = option(
    "--task",
    default="game24",
    metavar="NAME",
    heading="Search",
    common=True,
    shell_complete=names_of("task"),
    help="Kind of problem; see 'arbor list tasks'.",
)

controller_option = option(
    "--controller",
    default="tot",
    metavar="NAME",
    heading="Search",
    common=True,
    shell_complete=names_of("controller"),
    help="Chooses the leaves to grow; see 'arbor list controllers'.",
)

judging_options = option_group(
    option(
        "--verifier",
        default="self",
        metavar="NAME",
        heading="Search",
        shell_complete=names_of("verifier"),
        help="Judges thoughts; see 'arbor list verifiers'.",
    ),
    option(
        "--audit-verify",
        is_flag=True,
        heading="Search",
        help="Compute verifications that 'cgee' skips or ends early, and count disagreements.",
    ),
    option(
        "--aggregate",
        default="best",
        metavar="NAME",
        heading="Search",
        shell_complete=names_of("aggregate"),
        help="Chooses the answer of the finished paths; see 'arbor list aggregates'.",
    ),
    option(
        "--max-depth",
        type=Integer(1),
        metavar="N",
        heading="Search",
        help="Most thoughts on one path; default: the task's.",
    ),
    option(
        "--path-tokens",
        type=Integer(1),
        metavar="N",
        heading="Search",
        common=True,
        help="Most tokens of one path; default: the task's.",
    ),
    option(
        "--step-tokens",
        type=Integer(1),
        metavar="N",
        heading="Search",
        help="Most tokens in one thought; default: the task's.",
    ),
    option(
        "--step-format",
        metavar="KIND:TEXT",
        heading="Search",
        help="Format of every thought: regex:PATTERN, json:SCHEMA or json:FILE.",
    ),
    option(
        "--branch-stop",
        metavar="WHICH",
        heading="Search",
        help="End branches early where one is confident: all, or the others.",
    ),
    option(
        "--set",
        multiple=True,
        metavar="KEY=VALUE",
        heading="Search",
        common=True,
        help="Setting of a component or of sampling, as in width=4; may be repeated.",
    ),
)

search_shape_options = option_group(preset_option, task_option, controller_option, judging_options)

budget_option = option(
    "--budget",
    default="full",
    metavar="X",
    heading="KV budget",
    common=True,
    help="KV to keep: a part of what full retention holds (0.25), or a size: 8192tok, 6GiB.",
)

policy_option = option(
    "--policy",
    metavar="NAME[,KEY=VALUE]",
    heading="KV budget",
    common=True,
    shell_complete=names_of("policy"),
    help="Eviction policy (arbor list policies). Default: reentry; lossy: ends.",
)

retention_options = option_group(
    option(
        "--mode",
        type=click.Choice(["lossless", "lossy"]),
        default="lossless",
        heading="KV budget",
        help="lossless: same answer at any budget; lossy: running paths lose tokens too.",
    ),
    option(
        "--rehydrate",
        type=click.Choice(["selective", "span", "off"]),
        heading="KV budget",
        help="Recompute missing tokens (selective), whole blocks (span), or nothing (off; lossy only).",
    ),
    option(
        "--host",
        metavar="SIZE",
        heading="KV budget",
        help="Host memory for KV that left the device (8GiB, 20000tok): it is copied back.",
    ),
    option(
        "--host-bits",
        type=int,
        metavar="BITS",
        heading="KV budget",
        help="Bits of a number in host memory (8, 4, 2); default: the model's. Lossy mode.",
    ),
    option(
        "--staging",
        metavar="SIZE",
        heading="KV budget",
        help="Read the host's KV where it is, through a buffer of this size (64tok).",
    ),
    option(
        "--disk",
        metavar="SIZE",
        heading="KV budget",
        help="Room on disk for what the host has no room for (50GiB).",
    ),
    option(
        "--disk-dir",
        metavar="DIR",
        heading="KV budget",
        help="Folder of that file; default: the system's for temporary files.",
    ),
    option(
        "--fetch",
        default="auto",
        metavar="WHEN",
        heading="KV budget",
        help="Copy KV back where that is faster than computing it (auto), or always.",
    ),
    option(
        "--keep-kv",
        metavar="DIR",
        heading="KV budget",
        help="Keep the KV of prompts in a folder, for later runs that begin alike.",
    ),
    option(
        "--keep-kv-size",
        metavar="SIZE",
        default="4GiB",
        heading="KV budget",
        help="Most bytes in that folder; the least recently used go first.",
    ),
    option(
        "--share",
        type=click.Choice(["exact", "prompts", "off", "similar", "audit"]),
        default="exact",
        heading="KV budget",
        help="Equal beginnings share KV: exact, prompts or off; lossy: similar prompts do too, or audit.",
    ),
    option(
        "--share-threshold",
        type=Number(-1, 1),
        default=0.82,
        metavar="X",
        heading="KV budget",
        help="Least similarity of prompts for --share similar.",
    ),
    option(
        "--msve",
        metavar="FILE",
        heading="KV budget",
        help="Block values written by 'arbor calibrate msve'; default: those of the model.",
    ),
)

loading_options = option_group(
    revision_option,
    adapter_option,
    option(
        "--dtype",
        default="auto",
        metavar="NAME",
        heading="Model",
        help="Data type; auto: that of the weights.",
    ),
    option(
        "--kv-dtype",
        type=click.Choice(KV_DTYPES),
        default="auto",
        heading="Model",
        help="Data type of the KV; int8: 8 bits with scales, lossy, CPU only; auto: the model's.",
    ),
    option(
        "--weights",
        type=click.Choice(WEIGHTS),
        default="auto",
        heading="Model",
        help="Weights of linear layers; int8: 8 bits with scales, lossy, CPU only.",
    ),
    option(
        "--device",
        default="auto",
        metavar="NAME",
        heading="Model",
        help="cpu or cuda; auto: cuda where available.",
    ),
    option(
        "--backend",
        default="auto",
        metavar="NAME",
        heading="Model",
        shell_complete=names_of("backend"),
        help="Attention kernels: auto, native, flashinfer, torch, rowwise, invariant or reference.",
    ),
    option(
        "--kv-probe",
        default="kept",
        metavar="WHAT",
        heading="Model",
        help="When rows read a shared span once: as measured before (kept), measure, off, or 8,4,2.",
    ),
    option(
        "--cuda-graphs/--no-cuda-graphs",
        default=True,
        heading="Model",
        show_default=False,
        help="Capture and replay decode steps (CUDA with FlashInfer); default: yes.",
    ),
    trust_option,
)

search_options = option_group(search_shape_options, budget_option, policy_option, retention_options)

model_option = option(
    "--model",
    default="builtin:sapling",
    metavar="NAME|DIR",
    heading="Model",
    common=True,
    help="The built-in model, a directory, or a Hugging Face id.",
)

deterministic_option = option(
    "--deterministic",
    is_flag=True,
    heading="Sampling",
    help="Require bitwise equal results for any batch (no mixture of experts).",
)

threads_option = option(
    "--threads",
    type=Integer(1),
    metavar="N",
    heading="Limits",
    help="CPU threads of torch; default: one for small models.",
)

sampling_options = option_group(
    option(
        "--temperature",
        type=Number(0),
        metavar="X",
        heading="Sampling",
        common=True,
        help="0 is greedy; default: the model's.",
    ),
    option(
        "--top-p",
        type=Number(0, 1),
        metavar="X",
        heading="Sampling",
        help="Nucleus sampling; 1 is off, 0 is greedy; default: the model's.",
    ),
    option(
        "--top-k",
        type=Integer(0),
        metavar="N",
        heading="Sampling",
        help="Only the N most likely tokens; 0 is off; default: the model's.",
    ),
    option(
        "--seed",
        type=Integer(0),
        metavar="N",
        default=0,
        heading="Sampling",
        common=True,
        help="Seed of all random streams.",
    ),
    deterministic_option,
)

max_expansions_option = option(
    "--max-expansions",
    type=Integer(1),
    metavar="N",
    heading="Limits",
    help="Most leaves to grow.",
)

max_tokens_option = option(
    "--max-tokens",
    type=Integer(1),
    metavar="N",
    heading="Limits",
    help="Most tokens in finished thoughts; then the best answer so far.",
)

other_limit_options = option_group(
    max_expansions_option,
    option(
        "--timeout",
        type=Number(0, min_open=True),
        metavar="S",
        heading="Limits",
        help="Most seconds; then the best answer so far.",
    ),
    threads_option,
    option(
        "--first",
        type=click.Choice(["answer", "verified"]),
        heading="Limits",
        help="Stop at the first answer, or at the first that the verifier values at 0.5 or more.",
    ),
    option(
        "--confidence",
        type=Number(0, 1, min_open=True),
        metavar="X",
        heading="Limits",
        help="Stop once the best answer has this value or, in a vote, this chance to stay ahead.",
    ),
)

limit_options = option_group(other_limit_options, max_tokens_option)

trace_detail_options = option_group(
    option(
        "--trace-level",
        type=click.Choice(get_args(Detail)),
        default="events",
        heading="Output",
        help="Detail of decoding: a line for many steps (events), for each, or for each with its tokens.",
    ),
    option(
        "--trace-text",
        type=click.Choice(["full", "none"]),
        default="full",
        heading="Output",
        help="none omits the text of problem, thoughts and answer.",
    ),
)

config_option = option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    heading="Output",
    is_eager=True,
    expose_value=False,
    callback=take_defaults,
    help="Defaults from a TOML file; flags and environment variables win.",
)
