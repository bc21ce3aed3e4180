"""Measuring: every arm on every problem, each record on disk as soon as it is known."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_policies import Blocks, variant

from arbor import Solver
from arbor.errors import ArborError, InputError
from arbor.events import Event
from arbor.measure.evaluation.dataset import Sample
from arbor.measure.replay import RecordedSearch, replay_smallest
from arbor.measure.timing import turned
from arbor.model.checkpoint import Checkpoint
from arbor.papers.rksc.calibration import Recorder, Verification
from arbor.run.solution import Solution

from .arms import LOSSLESS_PARTS, REFERENCE, REPLAYED, SEARCHES, Arm, reference

Record = dict[str, Any]
UNREADABLE: Record = {"error": "unreadable", "message": "full retention cannot read it"}
GATES = "gates/tot-bfs/self/1"  # the key of verifications that are recorded by layer


class Records:
    """What was measured so far, one JSON object a line; a torn last line counts as not measured.

    Args:
        path: of the file; made with its first record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str], Record] = {}
        whole = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            whole.append(line)
            self._found[record["sample"], record["arm"]] = record
        if path.exists():
            path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._found)

    def get(self, sample: str, arm: str) -> Record | None:
        """The record of an arm on a sample; None before it is measured."""
        return self._found.get((sample, arm))

    def add(self, sample: str, arm: str, facts: Mapping[str, Any]) -> Record:
        """Write a record."""
        record = {"sample": sample, "arm": arm, **facts}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._found[sample, arm] = record
        return record


@dataclass
class Measuring:
    """A model on the problems of a dataset, its weights loaded once for all arms.

    Attributes:
        common: settings of every solver: model, task, device, threads and so on.
        records: found and to be added to.
        checkpoints: loaded, by what makes other weights.
    """

    common: Mapping[str, Any]
    records: Records
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)

    def solver(
        self, search: str, listeners: Sequence[Callable[[Event], None]] = (), **settings: Any
    ) -> Solver:
        """A solver of a search, with the weights of the others."""
        own = {**self.common, **SEARCHES[search], **settings}
        solver = Solver(**own, listeners=tuple(listeners))
        key = str(own.get("kv_dtype", "auto"))
        solver.checkpoint = self.checkpoints.setdefault(key, solver.checkpoint)
        return solver

    def missing(self, arms: Sequence[Arm], sample: Sample) -> list[Arm]:
        """The arms that this sample lacks."""
        return [arm for arm in arms if self.records.get(sample.id, arm.key) is None]

    def measure(self, arms: Sequence[Arm], sample: Sample, place: int) -> None:
        """Search one problem by every arm, those of a search in turn.

        An arm that this model or machine does not have ends in a record with its error; a setting
        with which full retention cannot run ends the run.

        Args:
            arms: of any searches.
            sample: the problem.
            place: of the sample; each begins with another arm, so that drifts of the machine are
                spread evenly.

        Raises:
            ArborError: full retention cannot run, for another reason than the problem.
        """
        for search in SEARCHES:
            missing = self.missing([arm for arm in arms if arm.search == search], sample)
            if missing:
                peak = int(self._reference(search, sample).get("peak", 0))
                for arm in turned(missing, place):
                    self._search(arm, sample, peak)
        gc.collect()  # the KV of the engines

    def _reference(self, search: str, sample: Sample) -> Record:
        """Full retention of the problem, and its replays under other policies."""
        arm = reference(search)
        known = self.records.get(sample.id, arm.key)
        if known is not None:
            return known
        events: list[Event] = []
        found = self._solved(arm, sample, None, events.append)
        if not found["error"] and search != "chain":
            found["replayed"] = self._replayed(search, events, found["peak"])
        return self.records.add(sample.id, arm.key, found)

    def _replayed(self, search: str, events: list[Event], peak: int) -> list[Record]:
        """Recomputed tokens by policy and part of the peak."""
        recording = RecordedSearch.of(events)
        tokenizer = self.solver(search).tokenizer
        rows = []
        for part in LOSSLESS_PARTS:
            for name in REPLAYED:
                policy, msve = variant(name)
                slots = max(math.floor(part * peak), 1)
                held, metrics = replay_smallest(
                    recording, tokenizer, slots=slots, policy=policy, scores=msve
                )
                recomputed = metrics.tokens_recomputed
                rows.append(
                    {"part": part, "policy": name, "recomputed": recomputed, "fits": held == slots}
                )
        return rows

    def _search(self, arm: Arm, sample: Sample, peak: int) -> None:
        facts = UNREADABLE
        if peak:
            facts = self._solved(arm, sample, peak if arm.part < 1 else None)
        self.records.add(sample.id, arm.key, facts)

    def _solved(
        self,
        arm: Arm,
        sample: Sample,
        peak: int | None,
        listener: Callable[[Event], None] | None = None,
    ) -> Record:
        """What one search found and cost.

        Args:
            peak: of full retention, of which `Arm.part` is held; None: everything is held.
        """
        blocks = Blocks()
        listeners = [blocks.hear] if listener is None else [blocks.hear, listener]
        try:
            solver = self._solver_of(arm, listeners)
            assert sample.problem is not None, "samples were read with their problems"
            budget, smallest = "full", False
            if peak is not None:
                least = 1 if arm.lossy else solver.plan(sample.problem).enough_tokens
                slots = max(math.floor(arm.part * peak), least)
                budget, smallest = f"{slots}tok", slots == least and not arm.lossy
            solver.load()  # not timed
            began, began_cpu = time.perf_counter(), time.process_time()
            solution = solver.solve(sample.problem, expected=sample.expected, budget=budget)
            cpu_s, wall_s = time.process_time() - began_cpu, time.perf_counter() - began
        except ArborError as error:
            if arm.question == REFERENCE and not isinstance(error, InputError):
                raise
            return _failure(error)
        return {
            "error": "",
            "cpu_s": round(cpu_s, 4),
            "wall_s": round(wall_s, 4),
            "tree": digest_of(blocks),
            "smallest": smallest,
            **_facts(solution),
        }

    def _solver_of(self, arm: Arm, listeners: Sequence[Callable[[Event], None]] = ()) -> Solver:
        settings = dict(arm.settings)
        if arm.policy:
            settings["policy"], settings["msve"] = variant(arm.policy)
        return self.solver(arm.search, listeners, **settings)

    def measure_together(self, arm: Arm, samples: Sequence[Sample], at_once: int) -> int:
        """Search many problems by a lossy arm that is not timed, several at a time in one engine,
        each within its own budget; returns how many were not measured before.

        Args:
            arm: holds a part of the peak of full retention.
            samples: the problems.
            at_once: in progress at a time.
        """
        assert arm.lossy, "in lossless mode searches share their budget"
        missing = [each for each in samples if self.records.get(each.id, arm.key) is None]
        peaks = [int(self._reference(arm.search, each).get("peak", 0)) for each in missing]
        for sample, peak in zip(missing, peaks, strict=True):
            if not peak:
                self.records.add(sample.id, arm.key, UNREADABLE)
        able = [(each, peak) for each, peak in zip(missing, peaks, strict=True) if peak]
        blocks = [Blocks() for _ in able]
        jobs: Iterator[tuple[Any, Any]] = (
            (
                sample.problem,
                {
                    "expected": sample.expected,
                    "budget": f"{max(math.floor(arm.part * peak), 1)}tok",
                },
            )
            for sample, peak in able
        )
        try:
            solver = self._solver_of(arm)
            searched = solver.as_completed(
                jobs, concurrency=at_once, listen=lambda place, event: blocks[place].hear(event)
            )
            for place, found in searched:
                if isinstance(found, ArborError):
                    facts = _failure(found)
                else:
                    facts = {"error": "", "tree": digest_of(blocks[place]), **_facts(found)}
                self.records.add(able[place][0].id, arm.key, facts)
        except ArborError as error:  # this model or machine does not have the arm
            for sample, _ in able:
                if self.records.get(sample.id, arm.key) is None:
                    self.records.add(sample.id, arm.key, _failure(error))
        gc.collect()  # the KV of the engine
        return len(missing)

    def measure_gates(self, sample: Sample) -> None:
        """Verify every thought of one problem in full, and record what each layer would say."""
        if self.records.get(sample.id, GATES) is not None:
            return
        recorder = Recorder()
        try:
            solver = self.solver("tot-bfs", verifier=recorder)
            recorder.solver = solver
            assert sample.problem is not None, "samples were read with their problems"
            solver.solve(sample.problem, expected=sample.expected)
        except ArborError as error:
            self.records.add(sample.id, GATES, _failure(error))
            return
        found = [dataclasses.asdict(each) for each in recorder.found]
        self.records.add(sample.id, GATES, {"error": "", "verifications": found})


def _failure(error: ArborError) -> Record:
    return {"error": error.code, "message": error.message}


def digest_of(blocks: Blocks) -> str:
    """A short name of the tree that was heard."""
    tokens = repr(sorted(blocks.take().items())).encode()
    return hashlib.blake2b(tokens, digest_size=8).hexdigest()


def _facts(solution: Solution) -> Record:
    metrics = solution.metrics
    return {
        "correct": bool(solution.correct),
        "answer": solution.answer,
        "generated": metrics.tokens_generated,
        "recomputed": metrics.tokens_recomputed,
        "stored": metrics.tokens_stored,
        "fetched": metrics.tokens_fetched,
        "streamed_bytes": metrics.streamed_bytes,
        "bytes_per_token": metrics.bytes_per_token,
        "steps": metrics.steps,
        "peak": metrics.peak_tokens,
        "budget": metrics.budget_tokens,
        "over": metrics.peak_tokens > metrics.budget_tokens,
        "finish": solution.finish_reason,
    }


def verifications_of(record: Mapping[str, Any], problem: int) -> list[Verification]:
    """The verifications of a record, as `calibrate_exit` reads them."""
    return [
        Verification(
            problem=problem,
            confidence=each["confidence"],
            gap=each["gap"],
            confident=each["confident"],
            values=tuple(each["values"]),
            rows=tuple(each["rows"]),
            uncertainties=tuple(map(tuple, each["uncertainties"])),
            by_layer=tuple(map(tuple, each["by_layer"])),
        )
        for each in record.get("verifications", ())
    ]
