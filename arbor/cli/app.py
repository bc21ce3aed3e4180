"""The root command: the table of commands, and an exit code for every way to end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from arbor._version import __version__
from arbor.cli.command import Group, Option, unknown_variables
from arbor.cli.options import COMPLETION, output_options
from arbor.cli.output import (
    ClosedStdout,
    LoadingLine,
    Messages,
    Output,
    close_log,
    configure_log,
    discard,
    encodable,
)
from arbor.cli.signals import Interrupted, raising
from arbor.errors import ArborError, OutOfMemory, UsageError
from arbor.feature import features
from arbor.support.atomic_write import DISK_FULL, FREE_SPACE
from arbor.support.shortage import is_out_of_memory
from arbor.support.stages import showing

# module and purpose of each command; help, --version and TAB import none of them
COMMANDS = {
    "solve": ("arbor.cli.solve:solve", "Solve one problem."),
    "eval": ("arbor.cli.evaluation.eval:eval_", "Solve many problems into a resumable folder."),
    "compare": (
        "arbor.cli.evaluation.compare:compare",
        "Compare controllers on the same problems, at equal tokens and KV.",
    ),
    "bench": ("arbor.cli.bench:bench", "Time one search under several budgets and policies."),
    "generate": ("arbor.cli.generate:generate", "Continue a text by token-level beam search."),
    "demo": ("arbor.cli.demo:demo", "Solve a small example and write it as an HTML page."),
    "view": ("arbor.cli.view:view", "Show a trace as an HTML page, or as a tree in the terminal."),
    "replay": (
        "arbor.cli.replay:replay",
        "Compare policies and budgets on a recorded search.",
    ),
    "calibrate": ("arbor.cli.calibrate:calibrate", "Calibrate policy estimates."),
    "prompt": ("arbor.cli.prompt:prompt", "Show what a model reads of a problem."),
    "info": ("arbor.cli.show:info", "Show a model's size and the memory at each budget."),
    "list": ("arbor.cli.show:list_", "List available names, with their settings and defaults."),
    "trace": ("arbor.cli.trace:trace", "Inspect, check, compare, convert and repair traces."),
    "doctor": ("arbor.cli.show:doctor", "Show versions, devices and settings, for a bug report."),
    "completion": (
        "arbor.cli.completion:completion",
        "Print a shell script for completion on TAB.",
    ),
} | {name: command for each in features() for name, command in each.commands.items()}
# options of other programs that spread one model over several devices
SPREADING = ("--device-map", "--tensor-parallel-size", "--tensor-parallel")
EXIT_BUG = 1
EXIT_INTERRUPTED = 130


@click.group(cls=Group, lazy=COMMANDS)
@click.version_option(
    __version__, prog_name="arbor", message="%(prog)s %(version)s", cls=Option, common=True
)
@output_options
@click.pass_obj
def cli(output: Output) -> None:
    """Search a tree of thoughts with a language model, within a KV budget.

    \b
      arbor solve "4 5 6 10"                the built-in model, offline, on a CPU
      arbor solve "4 5 6 10" --budget 0.25  the same answer, a quarter of the KV
      arbor info                            its size, and memory at each budget
    """
    _check_folder()
    configure_log(output)
    for warning in unknown_variables(cli):
        output.warn(f"warning: {warning}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _check_folder() -> None:
    """Refuses a working directory that is gone: libraries of torch end a process there.

    Raises:
        UsageError: it is.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        message = "the working directory does not exist any more."
        raise UsageError("no-folder", message, "Change to one that does: cd DIR.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    output = Output(json="--json" in words, debug="--debug" in words)
    _open_streams()
    _escape_unencodable()
    stderr, sys.stderr = sys.stderr, Messages(sys.stderr)
    try:
        if COMPLETION in os.environ:
            cli.main(words, prog_name="arbor")
        with raising(), showing(LoadingLine(output)):
            return _run(words, output)
    except BrokenPipeError:
        discard(sys.stdout)  # the reader has closed the pipe
        return 0
    except KeyboardInterrupt as stopped:
        code = stopped.exit_code if isinstance(stopped, Interrupted) else EXIT_INTERRUPTED
        _fail(output, ArborError("interrupted", "stopped at once."))
        if any(thread.name == "arbor-search" for thread in threading.enumerate()):
            _flush()
            os._exit(code)  # a forward pass may still run in a thread
        return code
    finally:
        close_log()
        sys.stderr = stderr


def _run(words: list[str], output: Output) -> int:
    try:
        with cli.make_context("arbor", words, obj=output, auto_envvar_prefix="ARBOR") as ctx:
            code = cli.invoke(ctx)
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(output, _usage(error))
    except click.Abort:
        raise KeyboardInterrupt from None
    except (ArborError, BrokenPipeError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        return _fail(output, _with_models(error))
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:
            what = f"{os.fsdecode(error.filename)}: {error.strerror}."
            return _fail(output, UsageError("no-permission", what, "See its permissions: ls -ld."))
        if error.errno not in (*DISK_FULL, errno.EIO):
            return _unexpected(output, words, error)
        discard(sys.stdout)
        what = f"the output cannot be written: {error.strerror}."
        return _fail(output, UsageError("output-unwritable", what, FREE_SPACE))
    except Exception as error:
        return _unexpected(output, words, error)


def _with_models(error: ArborError) -> ArborError:
    """The same error; for a model missing offline, with the cached models."""
    if error.code != "offline":
        return error
    from arbor.cli.show import with_models

    return with_models(error)


def _usage(error: click.ClickException) -> UsageError:
    context: click.Context | None = getattr(error, "ctx", None)
    path = "arbor" if context is None else context.command_path
    message, hint = f"{error.format_message().rstrip('.')}.", f"See '{path} --help'."
    if "unexpected extra argument" in message and context and "problem" in context.params:
        hint = f'Put the problem in quotes: {path} "4 5 6 10".'
    if isinstance(error, click.NoSuchOption):
        hint = f"See '{path} --help-all'."
        if error.option_name in SPREADING:
            hint = (
                "--tp N divides a model among N processes, 'arbor eval --workers N' puts a copy on "
                "each of several devices; for a larger model see docs/compatibility.md."
            )
    if isinstance(error, click.NoSuchOption) and error.option_name == "-o" and context:
        names = {parameter.name for parameter in context.command.params}
        files = [flag for flag in ("--trace", "--html") if flag[2:] in names]
        hint = f"Name the file with {' or '.join(files)}." if files else hint
    return UsageError("usage", message, hint)


def _fail(output: Output, error: ArborError) -> int:
    """Reports an error on stderr, and with ``--json`` on stdout."""
    if output.debug and sys.exc_info()[0] is not None:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(encodable(f"arbor: error: {error}", sys.stderr), file=sys.stderr)
    if output.json and not isinstance(sys.stdout, ClosedStdout):
        try:
            click.echo(json.dumps({"error": error.to_dict()}, default=str))
        except OSError:
            discard(sys.stdout)
    return error.exit_code


def _unexpected(output: Output, words: list[str], error: Exception) -> int:
    """Reports an error that is none of this program's: too little memory, or a bug."""
    if not is_out_of_memory(error):
        return _crash(output, words, error)
    what = (str(error) or "there is no memory left for this process.").splitlines()[0]
    hint = "Try a smaller --budget, --device cpu, or a smaller model."
    return _fail(output, OutOfMemory("oom", what, hint))


def _crash(output: Output, words: list[str], error: Exception) -> int:
    """Reports a bug and writes its traceback to a file."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    report = f"arbor {__version__}, Python {sys.version}\narguments: {words!r}\n\n" + "".join(
        traceback.format_exception(error)
    )
    saved = "it could not be saved"
    for folder in (os.curdir, tempfile.gettempdir()):
        path = Path(folder, f"arbor-crash-{stamp}.txt")
        try:
            path.write_text(report, encoding="utf-8", errors="backslashreplace")
        except OSError:  # also a working directory that is gone
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            continue
        saved = f"the traceback is in {path.absolute()}"
        break
    hint = "Please attach it and the output of 'arbor doctor --json' to a report."
    _fail(output, ArborError("bug", f"{type(error).__name__}: {error}; {saved}.", hint))
    return EXIT_BUG


def _open_streams() -> None:
    """Replaces streams closed by the shell (``>&-``) with the null device, and stdout with one that
    refuses what would be lost."""
    null = Path(os.devnull)
    sys.stdin = sys.stdin or null.open(encoding="utf-8")  # stays open until exit
    sys.stdout = sys.stdout or ClosedStdout()
    sys.stderr = sys.stderr or null.open("w", encoding="utf-8")


def _escape_unencodable() -> None:
    """Writes characters that a stream cannot encode as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
