"""``arbor solve``: one problem in, one answer out."""

from __future__ import annotations

import contextlib
import sys
import timeit
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from arbor.budget import Plan
from arbor.cli.build import build_solver, warn_of_misfit
from arbor.cli.command import Command
from arbor.cli.configure import CONFIG_PATH
from arbor.cli.options import config_option, output_options, preset_option
from arbor.cli.output import Output
from arbor.cli.output_paths import (
    refuse_closed_stdout,
    refuse_overwriting,
    refuse_unwritable,
)
from arbor.cli.problem_text import ProblemOptions
from arbor.cli.record_options import SolverOptions, options_of, read_options
from arbor.cli.signals import EXIT_SIGNAL, StopSignals
from arbor.errors import UsageError
from arbor.metrics import Metrics
from arbor.model.model_info import ModelInfo
from arbor.run.config import config_text
from arbor.run.limits import RunLimits
from arbor.run.listeners import RecordedEvents
from arbor.run.request import TraceDetail
from arbor.run.settings import recorded_of_machine
from arbor.support.setting import changed_settings, setting
from arbor.support.texts import clipped, duration_text, human_bytes, one_line
from arbor.tasks.base import BlockLimits
from arbor.trace.write import TraceWriter, refuse_existing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arbor.aggregate.base import AnswerVotes
    from arbor.run.setup import Setup
    from arbor.run.solution import Solution
    from arbor.run.stream import SearchStream
    from arbor.solver import Solver

EXIT_NO_ANSWER = 3
# of the table of answers
MOST_ANSWERS, MOST_PATHS = 10, 8
PLAN_SCHEMA = "arbor.plan/1"
CONFIG_SCHEMA = "arbor.config/1"
GUESSED = (
    "[guessed-answer] the text marks no answer; this is a guess, such as its last number. Try "
    "another model, or a wider search."
)


@dataclass(frozen=True, kw_only=True)
class TraceOptions(TraceDetail):
    """What a trace holds."""

    HEADING = "Output"

    trace_text: Literal["full", "none"] = setting(
        "full", "none omits all words: of problem, thoughts, answer and settings."
    )


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """Options of ``arbor solve``, named as on the command line."""

    HEADING = "Output"

    source: ProblemOptions
    expected: str | None = setting(
        None, "Answer key; adds 'correct' to the result.", heading="Problem", metavar="ANSWER"
    )
    solver: SolverOptions
    run: RunLimits
    dry_run: bool = setting(False, "Print only the plan; reads no weights.", heading="Limits")
    trace: Path | None = setting(
        None, "Write all events to FILE (.arbor.jsonl or .gz); off: no trace.", shown="short"
    )
    trace_detail: TraceOptions
    force: bool = setting(False, "Overwrite an existing trace.")
    html: Path | None = setting(None, "Write the search as an HTML page.", shown="short")
    open: bool = setting(False, "Open the page in the browser; needs --html.")
    print_config: bool = setting(
        False, "Print only the resolved configuration, as --config reads it."
    )


@click.command(cls=Command)
@click.argument("problem", required=False)
@preset_option
@options_of(SolveOptions)
@config_option
@output_options
@click.pass_obj
def solve(output: Output, /, **values: Any) -> int:
    """Solve one problem.

    \b
      arbor solve "4 5 6 10"
      arbor solve "4 5 6 10" --budget 0.25 --trace run.arbor.jsonl
      echo "4 5 6 10" | arbor solve - --controller beam --json
    """
    options = read_options(SolveOptions, values)
    if options.open and options.html is None:
        raise UsageError("usage", "--open needs a page.", "Add --html run.html.")
    optional = options.print_config and not options.source.given
    problem = None if optional else options.source.read()
    searches = not (options.dry_run or options.print_config)
    if searches:
        check_outputs(options)
    with (
        StopSignals() as signals,
        build_solver(options.solver, problem, searches=searches) as solver,
    ):
        if options.print_config:
            print_config(output, solver, problem, options)
            return 0
        assert problem is not None, "it was read above"
        warn_of_misfit(output, options.solver, solver)
        plan = solver.plan(problem)
        device, limits = options.solver.settings.device, solver.boundary
        expected = estimate_line(plan.blocks, limits, solver.describe(), device)
        if options.dry_run:
            if not output.json:
                output.print(f"{'weights':<18}{weights_text(solver.describe())}")
                if solver.setup.tp > 1:
                    output.print(f"{'processes':<18}{processes_text(solver.setup)}")
            print_plan(output, plan)
            if expected and not output.json:
                output.print(f"{'time':<18}{expected}")
            return 0
        output.say(budget_line(str(options.solver.given["budget"]), plan))
        if expected:
            output.say(expected)
        writer = None
        if options.trace is not None and str(options.trace) != "off":
            writer = TraceWriter(
                options.trace, text=options.trace_detail.trace_text, overwrite=options.force
            )
        sizes, solver_settings = weights_text(solver.describe()), options.solver.settings
        output.say(
            f"loading {solver_settings.model} · weights {sizes} · seed {solver_settings.seed}"
        )
        recording = RecordedEvents(sys.maxsize)
        if options.html is not None:
            solver.listeners = (recording,)
        stream = solver.stream(
            problem,
            expected=options.expected,
            **options.run.limits,
            trace=writer,
            trace_level=options.trace_detail.trace_level,
        )
        solution = watch(output, stream, signals, plan.blocks)
        rounding = solver.rounding
        if writer is not None and solution.trace_path is None:  # stopped before it began
            writer.close()
            if writer.path.is_file():
                writer.path.unlink()
    if output.json:
        output.document(solution.to_dict())
    elif solution.answer is not None:
        output.print(solution.answer)
    if solution.answer is None:
        output.warn(no_answer(solution))
    correct = None if solution.answer is None else solution.correct
    if solution.guessed:
        output.warn(GUESSED)
    if cut := cut_line(solution):
        output.say(cut)
    if output.verbose:
        for line in votes_table(solution.votes):
            output.say(line)
    ended = solution.limit or solution.finish_reason
    output.say(numbers_line(ended, solution.metrics, correct))
    if rounding is not None:
        output.say(str(rounding))
    if unreached := unreached_line(solution.metrics):
        output.say(unreached)
    if solution.trace_path is not None:
        output.say(f"trace {solution.trace_path}")
    if options.html is not None:
        from arbor.view import page_trace_of, write_page

        write_page(options.html, page_trace_of(options.html.stem, recording))
        output.say(f"page {options.html}")
        if options.open:
            output.open(options.html)
    if signals.received is not None:
        return EXIT_SIGNAL + signals.received
    return 0 if solution.answer is not None else EXIT_NO_ANSWER


def check_outputs(options: SolveOptions) -> None:
    """Refuses files to write that cannot be, or that are not to be, before anything is read.

    Raises:
        UsageError: names the option.
    """
    refuse_closed_stdout()
    refuse_unwritable("--html", options.html)
    outputs = {"--trace": options.trace, "--html": options.html}
    config_path = click.get_current_context().meta.get(CONFIG_PATH)
    refuse_overwriting(outputs, [options.source.file, config_path])
    if options.html is not None:
        from arbor.view import refuse_other_file

        refuse_other_file(options.html)
    if options.trace is not None and str(options.trace) != "off" and not options.force:
        refuse_existing(options.trace)


def print_config(
    output: Output, solver: Solver, problem: str | None, options: SolveOptions
) -> None:
    """The resolved configuration of the run, which repeats it on this machine."""
    config = {
        "problem": problem,
        "expected": options.expected,
        **options.run.limits,
        **changed_settings(options.trace_detail),
        **solver.config,
        **recorded_of_machine(solver.setup),
    }
    if output.json:
        output.document({"schema": CONFIG_SCHEMA, **config})
    else:
        output.print(config_text(config).rstrip())


def watch(output: Output, stream: SearchStream, signals: StopSignals, most_blocks: int) -> Solution:
    """Shows a search until it ends, or until a signal ends it; the solution."""
    from arbor.view.live import LiveView, LogView  # rich: not before there is something to show

    view: LiveView | LogView | None = None
    if output.progress == "live":
        view = LiveView(output.console(), most_blocks=most_blocks)
    elif output.progress == "plain":
        view = LogView(output.console(), most_blocks=most_blocks)
    with signals.stopping(stream), view or contextlib.nullcontext():
        for event in stream:
            if view is not None:
                view(event)
    return stream.solution


# Lines


def budget_line(budget: str, plan: Plan) -> str:
    """The budget in tokens and bytes, printed before the search."""
    whole = f"{plan.full_tokens:,} tokens ({human_bytes(plan.full_bytes)})"
    if plan.part is None:
        tokens = f"{plan.budget_tokens:,} tokens ({human_bytes(plan.budget_bytes)})"
        kept = f"keeps {tokens} at most; full retention needs {whole} at most"
    elif plan.part < 1:
        kept = (
            f"keeps {100 * plan.part:.3g} % of what full retention holds at the time, and one "
            f"expansion in any case; full retention needs {whole} at most"
        )
    else:
        kept = f"keeps everything, {whole} at most"
    stored = "" if plan.kv_dtype == "auto" else f" · KV {plan.kv_dtype}, lossy"
    return f"budget {budget} {kept}{_below(plan)}{stored}"


def _below(plan: Plan) -> str:
    """The sizes of the lower tiers, where there are some."""
    tiers = [("host", plan.host_tokens), ("disk", plan.disk_tokens)]
    bits = f" in {plan.host_bits} bits, lossy" if plan.host_bits else ""
    if plan.host_bits and plan.staging_tokens:
        bits = f", also in {plan.host_bits} bits, lossy"
    notes = {"host": bits, "disk": ""}
    sizes = [f" · {name} {tokens:,} tokens{notes[name]}" for name, tokens in tiers if tokens]
    if plan.staging_tokens:
        sizes.append(f", read through {plan.staging_tokens:,}")
    return "".join(sizes)


def numbers_line(reason: str, metrics: Metrics, correct: bool | None = None) -> str:
    """The cost of a run, printed after it.

    Args:
        reason: the limit that ended it, or else how it ended.
        metrics: its counters.
        correct: the grade of its answer.
    """
    ended = {
        "solved": "solved in",
        "exhausted": "exhausted after",
        "cut": "path cut at a limit after",
        "limit": "limit reached after",
        "max_expansions": "limit of expansions reached after",
        "max_tokens": "limit of tokens reached after",
        "first": "ended at the first answer after",
        "confidence": "confident after",
        "timeout": "time up after",
        "interrupted": "interrupted after",
    }
    parts = [
        f"{ended.get(reason, reason)} {metrics.wall_s:.1f} s",
        f"{metrics.blocks:,} blocks",
        f"{metrics.tok_per_s:.0f} tok/s",
        _peak(metrics),
    ]
    if metrics.tokens_loaded:
        parts.append(
            f"{metrics.tokens_loaded:,} of {metrics.tokens_prefilled:,} prompt tokens loaded"
        )
    if metrics.rehydrations:
        fetched = f", {metrics.tokens_fetched:,} fetched" if metrics.tokens_fetched else ""
        parts.append(
            f"{metrics.rehydrations:,} rehydrations "
            f"({metrics.tokens_recomputed:,} tokens recomputed{fetched})"
        )
    parts += metrics.remarks
    if metrics.verified:
        parts.append(f"model judged {metrics.asked:,} of {metrics.verified:,} thoughts")
    if metrics.verifications:
        parts.append(
            f"{metrics.skipped_verifications:,} of {metrics.verifications:,} verifications skipped"
        )
    if metrics.left_early:
        mean = metrics.layers_skipped / metrics.left_early
        parts.append(f"{metrics.left_early:,} judged {mean:.1f} layers early")
    if metrics.audited_verifications:
        parts.append(
            f"audit: {metrics.disagreements:,} of {metrics.audited_verifications:,} decided otherwise"
        )
    if metrics.reward_path_tokens:
        parts.append(
            f"reward model computed {metrics.reward_tokens:,} tokens "
            f"({100 * metrics.reward_reused:.0f} % of its paths reused, "
            f"peak {metrics.reward_peak_tokens:,}) in {metrics.reward_s:.1f} s"
        )
    if correct is not None:
        parts.append("correct" if correct else "wrong")
    return " · ".join(parts)


def _peak(metrics: Metrics) -> str:
    """The most KV that was held, of what the budget and full retention hold."""
    peak, size, notes = metrics.peak_tokens, human_bytes(metrics.peak_bytes), []
    if whole := metrics.retained_tokens:
        line = f"held {peak:,} of the {whole:,} tokens that full retention holds"
        notes.append(f"{100 * metrics.retained_share:.0f} %, {size}")
        if metrics.part < metrics.retained_share <= metrics.expansion_tokens / whole:
            notes.append("one expansion is that much")
    else:
        line = f"peak KV {peak:,} tokens, {size}"
        if metrics.part < 1:
            notes.append(f"{100 * metrics.budget_share:.0f} % of budget")
    if (unshared := metrics.peak_unshared_tokens) > peak:  # every leaf with its own path
        notes.append(f"{unshared:,} without prefix sharing")
    return f"{line} ({'; '.join(notes)})" if notes else line


def unreached_line(metrics: Metrics) -> str:
    """That a budget below full retention changed nothing, and which one would; else empty."""
    if metrics.budget_reached or metrics.budget_tokens >= metrics.full_tokens:
        return ""
    peak, smallest = metrics.peak_tokens, metrics.smallest_tokens
    if metrics.part:
        return "nothing had to be evicted: one expansion is all that full retention holds"
    line = f"this budget was never reached: peak {peak:,} of {metrics.budget_tokens:,} tokens"
    return f"{line}; {smallest}tok to {peak - 1}tok would evict KV" if smallest < peak else line


def cut_line(solution: Solution) -> str:
    """How many finished paths a limit has cut, next to an answer; empty where none was."""
    cut = sum(each.cut for each in solution.candidates)
    if not cut or solution.answer is None:
        return ""
    return (
        f"{cut:,} of {len(solution.candidates):,} paths cut at a limit; a larger --path-tokens, "
        "--step-tokens or --max-depth lets them end"
    )


def votes_table(votes: Sequence[AnswerVotes]) -> list[str]:
    """The answers with their votes, scores and paths, best first; the most common ones of many."""
    shown = votes[:MOST_ANSWERS]
    rows = [("answer", "votes", "score", "paths")]
    rows += [
        (
            one_line(clipped(each.answer)),
            str(each.votes),
            f"{each.score:.3f}",
            " ".join(f"#{node}" for node in each.paths[:MOST_PATHS])
            + (" …" if len(each.paths) > MOST_PATHS else ""),
        )
        for each in shown
    ]
    width = max(len(row[0]) for row in rows)
    lines = [f"{row[0]:<{width}}  {row[1]:>5}  {row[2]:>7}  {row[3]}" for row in rows]
    if len(votes) > len(shown):
        lines.append(f"… {len(votes) - len(shown):,} more answers")
    return lines if votes else []


def no_answer(solution: Solution) -> str:
    """Why a search has no answer, and what to try."""
    reasons = {
        "exhausted": (
            "search exhausted",
            "another --seed, or a wider search ('arbor list controllers')",
        ),
        "cut": (
            "paths cut at a limit of paths",
            "a larger --path-tokens, --step-tokens or --max-depth",
        ),
        "max_expansions": ("limit of expansions reached", "a larger max_expansions"),
        "max_tokens": ("limit of tokens reached", "a larger --max-tokens"),
        "timeout": ("time up", "a larger --timeout"),
    }
    ended = solution.limit or solution.finish_reason
    reason, hint = reasons.get(ended, (ended, "again"))
    return f"[no-answer] {reason} after {solution.metrics.blocks:,} blocks, no answer; try {hint}."


def weights_text(info: ModelInfo) -> str:
    """Dtype and memory of the weights as they are loaded."""
    lossy = "" if info.weights == "auto" else f", then {info.weights}, lossy"
    return f"{info.dtype}, {human_bytes(info.weights_bytes)}{lossy}"


def processes_text(setup: Setup) -> str:
    """What each of several processes has that hold a model together."""
    if setup.checkpoint.asked_device == "cpu":
        return f"{setup.tp}, each with a part of the weights, and the KV below"
    return (
        f"{setup.tp}, each with these weights and the KV below; no CUDA graphs, no steps ahead "
        "of the host"
    )


def print_plan(output: Output, plan: Plan) -> None:
    """Prints the plan on stdout."""
    if output.json:
        output.document({"schema": PLAN_SCHEMA, **plan.to_dict()})
        return
    rows: list[tuple[str, int, str]] = []
    if plan.part is None:
        rows.append(("budget", plan.budget_tokens, f"{plan.ratio:.3g} of the worst case"))
    else:
        whole = "everything" if plan.part == 1 else "at least one expansion"
        output.print(
            f"{'budget':<18}{plan.part:>10g} of what full retention holds at the time, {whole}"
        )
    rows.append(("worst case", plan.full_tokens, "full retention, at most"))
    least = "prompt, one thought and a question, as an amount"
    rows.append(("smallest workable", plan.smallest_tokens, least))
    rows.append(("enough", plan.enough_tokens, "for any tree, as an amount"))
    below = ("host", plan.host_tokens), ("disk", plan.disk_tokens)
    rows += [(name, tokens, "of what has left the device") for name, tokens in below if tokens]
    if plan.staging_tokens:
        rows.append(("staging", plan.staging_tokens, "of the budget, for what is read there"))
    in_few_bits = plan.host_token_bytes or plan.bytes_per_token
    both = bool(plan.host_bits and plan.staging_tokens)  # a token has room in either form
    sizes = {"host": in_few_bits + both * plan.bytes_per_token}
    for name, tokens, note in rows:
        size = human_bytes(tokens * sizes.get(name, plan.bytes_per_token))
        output.print(f"{name:<18}{tokens:>10,} tokens {size:>9}  {note}".rstrip())
    if plan.kv_dtype != "auto":
        size = human_bytes(plan.bytes_per_token)
        output.print(f"{'KV':<18}{plan.kv_dtype}, lossy: {size} per token, scales included")
    if plan.host_bits:
        size = human_bytes(plan.host_token_bytes)
        output.print(
            f"{'KV on the host':<18}{plan.host_bits} bits, lossy: {size} per token, with scales"
        )
    asked = f"{plan.question_tokens:,} question"
    if plan.proposals > 1:
        asked = f"{plan.proposals:,} questions of {plan.question_tokens:,}"
    output.print(
        f"{'shape':<18}{plan.prompt_tokens:,} prompt + {plan.blocks:,} blocks of "
        f"{plan.step_tokens:,} + {asked}, {plan.max_depth} deep"
    )


WORTH_SAYING_S = 10.0  # of a path; a shorter one is not announced
_SAMPLE = 2**26  # bytes that are read to measure the memory
_READS = 3


def step_seconds(info: ModelInfo) -> float:
    """Seconds of a decode step of few rows on a CPU: the weights are read once, by one core.

    Measures the memory, which takes some hundredths of a second. An int8 weight counts as a byte.
    """
    memory = b"\0" * _SAMPLE  # written, so that it is in memory
    best = min(timeit.repeat(lambda: memory.find(b"\1"), number=1, repeat=_READS))  # is nowhere
    size = info.weights_bytes if info.weights == "auto" else info.parameters
    return size * best / _SAMPLE


def estimate_line(blocks: int, boundary: BlockLimits, info: ModelInfo, device: str) -> str:
    """How large the search may become, and about how long a path takes; empty where that is a
    moment, for a GPU, whose memory is not measured, and without memory to measure with.
    """
    if device.startswith("cuda"):
        return ""
    try:
        seconds = step_seconds(info)
    except MemoryError:
        return ""
    most = min(boundary.longest_path, blocks * boundary.max_tokens)
    if seconds * most < WORTH_SAYING_S:
        return ""
    return (
        f"at most {blocks:,} thoughts, {most:,} tokens a path · estimate: {seconds:.2g} s a "
        f"token, {duration_text(seconds * most)} for the longest path on this CPU; its siblings decode with it"
    )
