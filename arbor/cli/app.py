"""The command's root: its parts, and what becomes of every way it can end."""

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
from arbor.cli.options import COMPLETION, Group, output_options
from arbor.cli.output import Output, encodable, leave_the_log, listen_to_the_log
from arbor.cli.signals import Interrupted
from arbor.errors import ArborError, OutOfMemory, UsageError

# where each command is, and what it is for: --help, --version and TAB import none of them
COMMANDS = {
    "solve": ("arbor.cli.solve:solve", "Solve one problem."),
    "eval": ("arbor.cli.eval:eval_", "Solve many problems into a folder that can go on."),
    "bench": ("arbor.cli.bench:bench", "Time one search under several budgets and policies."),
    "demo": ("arbor.cli.demo:demo", "Watch a search in about ten seconds."),
    "view": ("arbor.cli.view:view", "See a trace: one HTML page, or a tree in the terminal."),
    "replay": ("arbor.cli.replay:replay", "A recorded search under other policies and budgets."),
    "calibrate": ("arbor.cli.calibrate:calibrate", "Fit what policies believe to what happens."),
    "info": ("arbor.cli.show:info", "What a model needs, and what budgets buy."),
    "list": ("arbor.cli.show:list_", "The names there are, with their settings and defaults."),
    "trace": ("arbor.cli.trace:trace", "Look into a trace, check, compare, convert, repair it."),
    "doctor": ("arbor.cli.show:doctor", "What a bug report needs to know of this machine."),
    "completion": ("arbor.cli.completion:completion", "A script that completes on TAB."),
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
EXIT_BUG = 1
EXIT_INTERRUPTED = 130


@click.group(cls=Group, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="arbor", message="%(prog)s %(version)s")
@output_options
@click.pass_obj
def cli(voice: Output) -> None:
    """Search a tree of thoughts with a language model, within a KV budget.

    \b
      arbor solve "4 5 6 10"                  the built-in model, offline, on a CPU
      arbor solve "4 5 6 10" --budget 0.5     the same answer in half the KV
      arbor info                              what the model needs, what budgets buy
    """
    listen_to_the_log(voice)
    # threads that wait by spinning make a busy machine ten times slower; read when torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: instead of the process's own.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    voice = Output(json="--json" in given, debug="--debug" in given)
    _open_streams()
    _write_anything()
    try:
        if COMPLETION in os.environ:
            cli.main(given, prog_name="arbor")
        code = _run(given, voice)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()  # whoever read has seen enough
        return 0
    except KeyboardInterrupt as stopped:
        code = stopped.exit_code if isinstance(stopped, Interrupted) else EXIT_INTERRUPTED
        _fail(voice, ArborError("interrupted", "stopped at once."))
        if any(thread.name == "arbor-search" for thread in threading.enumerate()):
            _flush()
            os._exit(code)  # a forward pass may still run in a thread
        return code
    finally:
        leave_the_log()


def _run(given: list[str], voice: Output) -> int:
    try:
        with cli.make_context("arbor", given, obj=voice, auto_envvar_prefix="ARBOR") as ctx:
            code = cli.invoke(ctx)
            return code if isinstance(code, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(voice, _usage(error))
    except click.Abort:
        raise KeyboardInterrupt from None
    except (ArborError, BrokenPipeError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        return _fail(voice, _with_models(error))
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:
            what = f"{os.fsdecode(error.filename)}: {error.strerror}."
            return _fail(voice, UsageError("no-permission", what, "See its permissions: ls -ld."))
        if error.errno not in NO_ROOM:
            return _crash(voice, given, error)
        _drop_stdout()
        what = f"the output cannot be written: {error.strerror}."
        return _fail(voice, UsageError("output-unwritable", what, "Free some space first."))
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's; not imported for its name
            hint = "Try a smaller --budget, --device cpu, or a smaller model."
            return _fail(voice, OutOfMemory("oom", f"{str(error).splitlines()[0]}", hint))
        return _crash(voice, given, error)


def _with_models(error: ArborError) -> ArborError:
    """The same error; where a model is missing offline, with those that are there."""
    if error.code != "offline":
        return error
    from arbor.cli.cache import with_models

    return with_models(error)


def _usage(error: click.ClickException) -> UsageError:
    path = getattr(getattr(error, "ctx", None), "command_path", "arbor")
    message = error.format_message()
    return UsageError("usage", message, f"See '{path} --help'.")


def _fail(voice: Output, error: ArborError) -> int:
    """Tells an error; on stdout too where a program reads it."""
    if voice.debug and sys.exc_info()[0] is not None:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(encodable(f"arbor: error: {error}", sys.stderr), file=sys.stderr)
    if voice.json:
        click.echo(json.dumps({"error": error.to_dict()}, default=str))
    return error.exit_code


def _crash(voice: Output, given: list[str], error: Exception) -> int:
    """Tells a bug, and keeps its traceback in a file."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    report = f"arbor {__version__}, Python {sys.version}\narguments: {given!r}\n\n" + "".join(
        traceback.format_exception(error)
    )
    saved = "it could not be saved"
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        path = folder / f"arbor-crash-{stamp}.txt"
        with contextlib.suppress(OSError):
            path.write_text(report, encoding="utf-8", errors="backslashreplace")
            saved = f"the traceback is in {path}"
            break
    hint = "Please attach it and the output of 'arbor doctor --json' to a report."
    _fail(voice, ArborError("bug", f"{type(error).__name__}: {error}; {saved}.", hint))
    return EXIT_BUG


def _open_streams() -> None:
    """A stream that was closed before the program began (``>&-``) is one that says and takes nothing."""
    nothing = Path(os.devnull)
    sys.stdin = sys.stdin or nothing.open(encoding="utf-8")  # as long as the program
    sys.stdout = sys.stdout or nothing.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nothing.open("w", encoding="utf-8")


def _write_anything() -> None:
    """Characters a stream cannot encode are written as escapes instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Sends what is left in stdout's buffer nowhere, so that Python does not try again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
