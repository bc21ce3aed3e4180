"""Pages of an evaluation's samples: each recorded search as one HTML file next to its trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from arbor.errors import TraceError
from arbor.measure.evaluation.folder import TRACE_SUFFIX, TRACES
from arbor.measure.evaluation.results import Row


def page_of(trace: str) -> str:
    """The page of a trace: ``traces/a.arbor.jsonl.gz`` -> ``traces/a.html``."""
    return f"{trace.removesuffix(TRACE_SUFFIX)}.html"


def linked_pages(folder: Path, rows: Iterable[Row]) -> dict[str, str]:
    """The pages in a run's folder, by their traces; both are paths in the folder."""
    return {trace: page_of(trace) for trace in _traces(rows) if (folder / page_of(trace)).is_file()}


def write_sample_pages(folder: Path, rows: Iterable[Row]) -> list[str]:
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


def trace_of(row: Row) -> str | None:
    """The trace of a sample, as a path in the run's folder; none from elsewhere."""
    trace = row.get("trace")
    if isinstance(trace, str) and PurePosixPath(trace).parts[:-1] == (TRACES,):
        return trace
    return None


def _traces(rows: Iterable[Row]) -> Iterator[str]:
    """The traces of samples, as paths in the run's folder."""
    for row in rows:
        trace = trace_of(row)
        if trace is not None:
            yield trace
