"""Results of ``arbor eval``: written to the folder, and as lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbor._version import __version__
from arbor.cli.evaluation.eval_dataset import name_of
from arbor.errors import UsageError
from arbor.measure.evaluation.compare import difference_text, is_decided
from arbor.measure.evaluation.dataset import Sample
from arbor.measure.evaluation.folder import (
    PAGE,
    RESULTS,
    RunFolder,
    digest,
    linked_pages,
    read_results,
    read_rows,
    write_sample_pages,
)
from arbor.measure.evaluation.list_page import RunFacts
from arbor.measure.evaluation.page import index_page
from arbor.measure.evaluation.results import compare, results
from arbor.support.atomic_write import write_atomically
from arbor.support.texts import human_bytes
from arbor.trace.write import finite


@dataclass(frozen=True, slots=True)
class OtherRun:
    """A run to compare with."""

    path: Path
    rows: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path, samples: list[Sample]) -> OtherRun:
        """The finished samples of a folder.

        Raises:
            UsageError: none of `samples` is among them.
        """
        rows, _ = read_rows(path)
        there = [
            rows[sample.id].get("problem") == sample.text for sample in samples if sample.id in rows
        ]
        if not any(there):
            others = f"; {len(there):,} of their ids have other problems there" if there else ""
            raise UsageError(
                "run-disjoint",
                f"{path} has none of these {len(samples):,} samples{others}.",
                "Compare runs of the same dataset, split and --limit.",
                path=str(path),
            )
        return cls(path, rows)


def write_results(
    folder: RunFolder, dataset: str, samples: list[Sample], other: OtherRun | None
) -> dict[str, Any]:
    """Writes results and page of every sample in the folder.

    Returns:
        The results, as in ``results.json``.
    """
    rows = list(folder.rows.values())
    found = results(rows) | {
        "arbor": __version__,
        "dataset": dataset,
        "digest": digest(folder.config),
        "grader": folder.config.get("grader_version"),
        "folder": str(folder.path),
        "missing": sum(not folder.has(sample) for sample in samples),
    }
    compared = None if other is None else compare(folder.rows, other.rows)
    if other is not None and compared is not None:
        found["comparison"] = {"with": str(other.path), **compared}
    folder.write(RESULTS, json.dumps(finite(found), allow_nan=False, indent=1) + "\n")
    write_index(folder.path, found, rows)
    return found


def write_index(folder: Path, found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes the page of a run, with links to the pages of its searches.

    Args:
        folder: of the run.
        found: the results, as in ``results.json``.
        rows: rows of ``samples.jsonl``.

    Raises:
        UsageError: it cannot be written.
    """
    title, pages = f"arbor eval {name_of(str(found['dataset']))}", linked_pages(folder, rows)
    accuracy = (found["accuracy"], *found["interval"]) if found["n"] else None
    text = index_page(
        title,
        result_lines(found),
        rows,
        pages,
        accuracy=accuracy,
        made=RunFacts.read(folder),
    )
    write_atomically(folder / PAGE, text)
    return folder / PAGE


def write_samples(folder: Path) -> list[str]:
    """Writes the pages of a run's searches, and its list of samples with links to them.

    Returns:
        A sentence for each trace that cannot be read.

    Raises:
        InputError: not a run's folder, or one without results.
        UsageError: a page cannot be written.
    """
    rows, _ = read_rows(folder)
    unread = write_sample_pages(folder, rows.values())
    with read_results(folder / RESULTS, "run") as found:
        write_index(folder, found, list(rows.values()))
    return unread


def result_lines(found: Mapping[str, Any]) -> list[str]:
    """The results as lines of text."""
    n, (low, high) = found["n"], found["interval"]
    facts = {"accuracy": "none: no sample is finished"}
    if n:
        facts["accuracy"] = (
            f"{100 * found['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f}), "
            f"{found['right']:,} of {n:,} right"
        )
    if found["scores"]:
        shares = (f"{name} {100 * mean:.1f} %" for name, mean in found["scores"].items())
        facts["scores"] = f"mean per sample: {', '.join(shares)}"
    for key, name in (
        ("missing", "not run"),
        ("no_answer", "no answer"),
        ("invalid", "invalid"),
        ("guessed", "guessed"),
    ):
        if found.get(key):
            facts[name] = f"{found[key]:,}"
    if found.get("cut_paths"):
        facts["cut"] = (
            f"{found['cut']:,} of {n:,} samples; {found['cut_paths']:,} of {found['paths']:,} paths "
            "(--path-tokens, --max-depth)"
        )
    ended = {name: n for name, n in found["methods"].items() if name in ("timeout", "crashed")}
    if ended:
        facts["grading"] = ", ".join(f"{n:,} {name}" for name, n in ended.items())
    if found["errors"]:
        codes, first = found["error_codes"], found["first_error"]
        counts = ", ".join(f"{count:,} {code}" for code, count in codes.items())
        facts["errors"] = f"{counts}; the first: {first['message']} {first['hint']}".rstrip()
    generated, recomputed = found["tokens_generated"], found["tokens_recomputed"]
    facts["tokens"] = (
        f"mean per sample: {generated['mean']:,.0f} generated, {recomputed['mean']:,.0f} recomputed"
    )
    peak, size = found["peak_tokens"], human_bytes(found["peak_bytes"]["max"])
    facts["peak KV"] = (
        f"mean per sample: {peak['mean']:,.0f} tokens; largest: {peak['max']:,.0f}, {size}"
    )
    cpu = found["cpu_s"]
    facts["CPU time"] = f"mean per sample: {cpu['mean']:.2f} s; total: {cpu['total']:,.1f} s"
    facts["folder"] = str(found["folder"])
    lines = [f"{name:<12}{text}" for name, text in facts.items()]
    return lines + (_comparison(found["comparison"]) if "comparison" in found else [])


def _comparison(pair: Mapping[str, Any]) -> list[str]:
    text, p, n = difference_text({**pair, "value": pair["difference"]}), "", pair["n"]
    if is_decided(pair):
        low, high = pair["interval"]
        text = f"{100 * pair['difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
        p = f"; McNemar p = {pair['p']:.3g}"
    others = pair.get("other_problem", 0)
    left_out = f"; {others:,} left out, whose ids have other problems there" if others else ""
    lines = [
        f"{'compared':<12}{text} against {pair['with']}, {n:,} samples in both{left_out}",
        f"{'':<12}right: only this run {pair['only_first']:,}, only the other {pair['only_second']:,}{p}",
    ]
    for name, what in (
        ("tokens_recomputed", "recomputed"),
        ("peak_tokens", "peak KV"),
        ("cpu_s", "CPU s"),
    ):
        one = pair[name]
        low, high = one["interval"]
        digits = 2 if name == "cpu_s" else 0
        lines.append(
            f"{'':<12}{what}: {one['here']:,.{digits}f} against {one['there']:,.{digits}f}, "
            f"{one['difference']:+,.{digits}f} ({low:+,.{digits}f} to {high:+,.{digits}f})"
        )
    return lines
