"""RunFolder: the resumable folder of an evaluation.

    run.toml        every setting, resolved; ``arbor eval --config`` reads it
    samples.jsonl   one line per finished sample, in the order of finishing
    traces/         one trace per sample, and its page once ``arbor view --samples`` made it
    results.json    accuracy and costs
    index.html      a list of the samples

The last two are derived from the first two.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from arbor.errors import ArborError, InputError, TraceError, UsageError
from arbor.measure.evaluation.dataset import Sample
from arbor.measure.evaluation.results import SampleRow
from arbor.run.config import config_text, read_config
from arbor.support.atomic_write import DISK_FULL, FREE_SPACE, write_atomically
from arbor.support.file_lock import locked, unlock
from arbor.trace.write import to_line

CONFIG, SAMPLES, RESULTS, PAGE, TRACES = (
    "run.toml",
    "samples.jsonl",
    "results.json",
    "index.html",
    "traces",
)
TRACE_SUFFIX = ".arbor.jsonl.gz"
SAMPLE_SCHEMA = "arbor.sample/1"

# settings that select and record samples; a sample's result depends on none of them
SELECTION = ("limit", "sample_id", "on_error", "trace", "trace_level", "trace_text")
WEIGHTS = "model_content"  # setting: a digest of the model's files
SHOWN = 8  # settings that an error names

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,79}")


def digest(config: Mapping[str, Any]) -> str:
    """A configuration's digest: runs with the same digest solve a sample alike."""
    settings = json.dumps(sorted(_flat(config).items()), default=str)
    return hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()


def file_name(identity: str, other: str) -> str:
    """An id as the name of a file: itself, or with a hash where it is not a valid one.

    Args:
        identity: any text.
        other: begins the name of an id without a letter or digit.
    """
    if _PLAIN.fullmatch(identity):
        return identity
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", identity)[:40].strip("-")
    named = hashlib.blake2b(identity.encode("utf-8", "backslashreplace"), digest_size=6)
    return f"{plain or other}~{named.hexdigest()}"


def requested_config(path: Path, request: str) -> dict[str, Any] | None:
    """The configuration in a run's folder if the same request wrote it, unchanged; else None.

    Args:
        path: of the folder.
        request: as in `RunFolder`.
    """
    try:
        last = (path / CONFIG).read_text(encoding="utf-8").splitlines()[-1]
        config = read_config(path / CONFIG)
    except (OSError, ValueError, IndexError):  # InputError and UsageError are ValueErrors
        return None
    return config if last == _request_line(config, request) else None


def _request_line(config: Mapping[str, Any], request: str) -> str:
    """A comment of ``run.toml``: digests of the request and of the settings it resolved to."""
    settings = json.dumps(config, sort_keys=True, default=str)
    return f"# {request} {hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()}"


def refuse_other_files(path: Path, kind: str, settings: str, own: Sequence[str] = ()) -> None:
    """Refuse a folder that holds something other than a run or a comparison.

    Args:
        path: of the folder; it need not exist.
        kind: ``run`` or ``comparison``.
        settings: the file that every such folder has.
        own: what one may hold before it has that file.

    Raises:
        UsageError: names what it holds.
    """
    if not path.is_dir() or (path / settings).exists():
        return
    names = sorted(each.name for each in path.iterdir() if each.name not in own)
    strange = [name for name in names if not name.startswith(".")]
    if strange:
        raise UsageError(
            "run-foreign",
            f"{path} is not a {kind}'s folder; it holds {', '.join(strange[:3])}.",
            "Name a new folder: --output DIR.",
            path=str(path),
        )


def refuse_taken(path: Path) -> None:
    """Refuse a folder that holds something other than a run, or a run in progress; it is unchanged.

    Args:
        path: of the folder; it need not exist.

    Raises:
        UsageError: says which.
    """
    refuse_other_files(path, "run", CONFIG, (SAMPLES, TRACES))
    if (path / SAMPLES).exists():
        _opened(path).close()


def _opened(path: Path) -> io.FileIO:
    """The samples of a run's folder, open to append and locked for this process, where the system
    supports it.

    Raises:
        UsageError: it cannot be written, or another process is writing to it.
    """
    try:
        file = io.FileIO(path / SAMPLES, "a")
    except OSError as error:
        raise _unwritable(path, error) from error
    if not locked(file):
        file.close()
        raise UsageError(
            "run-busy",
            f"another process is writing to {path}.",
            "Wait for it, or name another folder: --output DIR.",
            path=str(path),
        )
    return file


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        "run-unwritable",
        f"the folder {path} cannot be written: {error.strerror}.",
        FREE_SPACE if error.errno in DISK_FULL else "Name one that may be: --output DIR.",
        path=str(path),
    )


def refuse_other_settings(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those of the run in a folder, if there is one.

    Args:
        path: of the folder.
        config: every setting of the run asked for.

    Raises:
        UsageError: names the settings that differ.
    """
    if not (path / CONFIG).exists():
        return
    there, here = _flat(read_config(path / CONFIG)), _flat(tomllib.loads(config_text(config)))
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if WEIGHTS in keys and not (WEIGHTS in there and WEIGHTS in here):
        keys.remove(WEIGHTS)  # a run of an earlier version, or a model that nothing identifies
    if keys == [WEIGHTS]:
        raise UsageError(
            "run-differs",
            f"{path} holds a run with other weights: the files of {here['model']} have changed "
            "since.",
            "Name another folder with --output, or start over with --fresh.",
            path=str(path),
            keys=keys,
        )
    if keys:
        # another controller has other settings; its name says enough
        named = {key.rpartition(".")[0] for key in keys if key.endswith(".name")}
        main = [k for k in keys if k.endswith(".name") or k.split(".")[0] not in named]
        shown = [
            f"{k} ({there.get(k, 'none')} there, {here.get(k, 'none')} here)" for k in main[:SHOWN]
        ]
        more = f" and {len(main) - SHOWN} more" if len(main) > SHOWN else ""
        raise UsageError(
            "run-differs",
            f"{path} holds a run with other settings: {', '.join(shown)}{more}.",
            "Give the same settings, name another folder with --output, or start over with --fresh.",
            path=str(path),
            keys=keys,
        )


@contextlib.contextmanager
def read_results(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The results of a run or a comparison, of which the block within makes pages.

    Args:
        path: of the file.
        kind: ``run`` or ``comparison``.

    Raises:
        InputError: the file is not there, or the block finds something else in it.
    """
    try:
        yield json.loads(path.read_bytes())
    except ArborError:
        raise
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            "run-unreadable",
            f"{path} is not the results of a {kind}.",
            f"The command that resumes the {kind} writes them again.",
            path=str(path.parent),
        ) from error


class RunFolder:
    """A run's folder, opened to start or resume it; one process at a time.

    Args:
        path: created if missing.
        config: every setting of the run.
        fresh: whether to delete an earlier run in it.
        request: digest of the options that `config` was resolved from; noted in ``run.toml``, so
            that a finished run can be shown again without resolving them. Empty for none.

    Attributes:
        rows: sample id -> its last line in ``samples.jsonl``.
        unreadable: number of unreadable lines in it.

    Raises:
        UsageError: the folder is not writable, holds other files, a run with other settings, or a
            run in progress.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], fresh: bool = False, request: str = ""
    ) -> None:
        self.path = path
        self.config = tomllib.loads(config_text(config))
        try:
            refuse_other_files(path, "run", CONFIG, (SAMPLES, TRACES))
            (path / TRACES).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        self._file = _opened(path)
        try:
            if fresh:
                self._clear()
            else:
                refuse_other_settings(path, self.config)
            self._cut_torn_line()
            self.rows, self.unreadable = read_rows(path)
            note = f"\n{_request_line(self.config, request)}\n" if request else ""
            self.write(CONFIG, config_text(config) + note)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Closes the file of samples; everything written stays."""
        unlock(self._file)

    def finished(self, sample: Sample) -> bool:
        """Whether this sample has been solved; failed samples are tried again."""
        return self.has(sample) and self.rows[sample.id].get("error") is None

    def has(self, sample: Sample) -> bool:
        """Whether this sample, with this problem and key, has been solved or has failed."""
        row = self.rows.get(sample.id, {})
        there = row.get("problem"), row.get("expected")
        return sample.id in self.rows and there == (sample.text, sample.expected)

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a finished sample; when this returns, a killed process no longer loses it.

        Raises:
            UsageError: the disk is full; the lines before are whole.
        """
        data = memoryview(to_line({"schema": SAMPLE_SCHEMA, **row}) + b"\n")
        end = self._file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise UsageError(
                "run-unwritable",
                f"{self.path / SAMPLES} cannot be written: {error.strerror}.",
                FREE_SPACE,
                path=str(self.path),
            ) from error
        self.rows[str(row["id"])] = dict(row)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run as a whole."""
        write_atomically(self.path / name, text)

    def trace_path(self, identity: str) -> Path:
        """Path of a sample's trace, named after its id."""
        return self.path / TRACES / f"{file_name(identity, 'sample')}{TRACE_SUFFIX}"

    def _clear(self) -> None:
        self._file.truncate(0)
        for name in (CONFIG, RESULTS, PAGE):
            (self.path / name).unlink(missing_ok=True)
        for suffix in (TRACE_SUFFIX, ".html"):
            for path in (self.path / TRACES).glob(f"*{suffix}"):
                path.unlink()

    def _cut_torn_line(self) -> None:
        """Removes half a line that a killed process left."""
        data = (self.path / SAMPLES).read_bytes()
        if data and not data.endswith(b"\n"):
            self._file.truncate(data.rfind(b"\n") + 1)


def read_rows(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The last line of each sample in a run's folder, and the number of unreadable lines.

    Raises:
        InputError: not a run's folder.
    """
    try:
        data = (path / SAMPLES).read_bytes()
    except OSError as error:
        raise InputError(
            "run-unreadable",
            f"{path / SAMPLES} cannot be read: {error.strerror}.",
            "Name a folder that 'arbor eval --output' has written.",
            path=str(path),
        ) from error
    rows: dict[str, dict[str, Any]] = {}
    unreadable = 0
    for line in data.split(b"\n"):
        row: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            rows[row["id"]] = row
        elif line.strip():
            unreadable += 1
    return rows, unreadable


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """``{"policy": {"name": "lru"}}`` as ``{"policy.name": "lru"}``, without `SELECTION`."""
    return dict(_settings({k: v for k, v in config.items() if k not in SELECTION}, ""))


def _settings(table: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{place}{key}.")
        elif value is not None:
            yield f"{place}{key}", value


def page_of(trace: str) -> str:
    """The page of a trace: ``traces/a.arbor.jsonl.gz`` -> ``traces/a.html``."""
    return f"{trace.removesuffix(TRACE_SUFFIX)}.html"


def linked_pages(folder: Path, rows: Iterable[SampleRow]) -> dict[str, str]:
    """The pages in a run's folder, by their traces; both are paths in the folder."""
    return {trace: page_of(trace) for trace in _traces(rows) if (folder / page_of(trace)).is_file()}


def write_sample_pages(folder: Path, rows: Iterable[SampleRow]) -> list[str]:
    """Writes a page for each trace of a run's folder that has no page, or an older one.

    Args:
        folder: of the run.
        rows: rows of ``samples.jsonl``.

    Returns:
        A sentence for each trace that cannot be read.

    Raises:
        UsageError: a page cannot be written.
    """
    from arbor.view import read_page_trace, write_page

    unread = []
    for trace in _traces(rows):
        source, page = folder / trace, folder / page_of(trace)
        try:
            if not page.is_file() or page.stat().st_mtime_ns < source.stat().st_mtime_ns:
                write_page(page, read_page_trace(source))
        except TraceError as error:
            unread.append(error.message)
        except OSError as error:
            unread.append(f"{source} cannot be read: {error.strerror}.")
    return unread


def trace_of(row: SampleRow) -> str | None:
    """The trace of a sample, as a path in the run's folder; none from elsewhere."""
    trace = row.get("trace")
    if isinstance(trace, str) and PurePosixPath(trace).parts[:-1] == (TRACES,):
        return trace
    return None


def _traces(rows: Iterable[SampleRow]) -> Iterator[str]:
    """The traces of samples, as paths in the run's folder."""
    for row in rows:
        trace = trace_of(row)
        if trace is not None:
            yield trace
