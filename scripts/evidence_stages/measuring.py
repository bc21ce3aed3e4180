"""Measuring: every arm on every problem, each record on disk as soon as it is known."""

from __future__ import annotations

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
from arbor.run.solution import Solution

from .arms import LOSSLESS_PARTS, REFERENCE, REPLAYED, SEARCHES, Arm, reference

Record = dict[str, Any]
ONE_EXPANSION = 0.01  # a part of full retention so small that no more than that fits
UNREADABLE: Record = {"error": "unreadable", "message": "full retention cannot read it"}


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
        """Full retention of the problem."""
        arm = reference(search)
        known = self.records.get(sample.id, arm.key)
        if known is not None:
            return known
        return self.records.add(sample.id, arm.key, self._solved(arm, sample, None))

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
            events: list[Event] = []
            replays = arm.question == "lossless" and arm.name == "full" and arm.search != "chain"
            listener = events.append if replays else None
            facts = self._solved(arm, sample, peak if arm.part < 1 else None, listener)
            if replays and not facts["error"]:
                facts["replayed"] = self._replayed(arm.search, events, facts["peak"])
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
            peak: of full retention, of which `Arm.part` is held; None: everything is held. Of trees
                of which nothing is lost it is a part of what full retention holds at the time.
        """
        blocks = Blocks()
        listeners = [blocks.hear] if listener is None else [blocks.hear, listener]
        try:
            solver = self._solver_of(arm, listeners)
            assert sample.problem is not None, "samples were read with their problems"
            budget: str | float = "full"
            if peak is not None:
                amount = arm.lossy or "staging" in arm.settings
                slots = max(math.floor(arm.part * peak), 1)
                budget = f"{slots}tok" if amount else max(arm.part, ONE_EXPANSION)
            solver.load()  # not timed
            began, began_cpu = time.perf_counter(), time.process_time()
            solution = solver.solve(sample.problem, expected=sample.expected, budget=budget)
            cpu_s, wall_s = time.process_time() - began_cpu, time.perf_counter() - began
        except ArborError as error:
            if arm.question == REFERENCE and not isinstance(error, InputError):
                raise
            return failure(error)
        allowed = solution.metrics.budget_tokens
        return {
            "error": "",
            "cpu_s": round(cpu_s, 4),
            "wall_s": round(wall_s, 4),
            "tree": digest_of(blocks),
            "smallest": isinstance(budget, float) and allowed > arm.part * (peak or 0),
            **_facts(solution),
        }

    def _solver_of(self, arm: Arm, listeners: Sequence[Callable[[Event], None]] = ()) -> Solver:
        settings = dict(arm.settings)
        if arm.policy:
            settings["policy"], settings["msve"] = variant(arm.policy)
        if arm.part == 1:
            settings["budget"] = "full"
        return self.solver(arm.search, listeners, **settings)

    def measure_together(self, arm: Arm, samples: Sequence[Sample], at_once: int) -> int:
        """Search many problems by an arm that is not timed, several at a time in one engine, each
        within its own budget; returns how many were not measured before.

        Args:
            arm: one that may lose KV, or a reference, which holds everything.
            samples: the problems.
            at_once: in progress at a time.

        Raises:
            ArborError: full retention cannot run, for another reason than a problem.
        """
        whole = arm.question == REFERENCE
        assert arm.lossy or arm.part == 1, "in lossless mode searches share their budget"
        missing = [each for each in samples if self.records.get(each.id, arm.key) is None]
        if not missing:
            return 0
        if not whole:
            self.measure_together(reference(arm.search), samples, at_once)
        able: list[tuple[Sample, int]] = []
        for sample in missing:
            peak = 0 if whole else self._peak(arm.search, sample)
            if whole or peak:
                able.append((sample, peak))
            else:
                self.records.add(sample.id, arm.key, UNREADABLE)
        blocks = [Blocks() for _ in able]
        jobs: Iterator[tuple[Any, Any]] = (
            (sample.problem, {"expected": sample.expected, **self._budget(arm, peak)})
            for sample, peak in able
        )
        try:
            solver = self._solver_of(arm)
            own = arm.part == 1 or solver.setup.own_budgets
            searched = solver.results(
                jobs,
                concurrency=at_once if own else 1,
                listen=lambda place, event: blocks[place].hear(event),
            )
            for place, found in searched:
                if isinstance(found, ArborError):
                    facts = failure(found)
                else:
                    facts = {"error": "", "tree": digest_of(blocks[place]), **_facts(found)}
                self.records.add(able[place][0].id, arm.key, facts)
        except ArborError as error:  # this model or machine does not have the arm
            if whole:
                raise
            for sample, _ in able:
                if self.records.get(sample.id, arm.key) is None:
                    self.records.add(sample.id, arm.key, failure(error))
        gc.collect()  # the KV of the engine
        return len(missing)

    def _peak(self, search: str, sample: Sample) -> int:
        return int((self.records.get(sample.id, reference(search).key) or {}).get("peak", 0))

    @staticmethod
    def _budget(arm: Arm, peak: int) -> dict[str, str]:
        """What an arm that may lose KV holds of a peak, as an option of a search."""
        return {"budget": f"{max(math.floor(arm.part * peak), 1)}tok"} if arm.part < 1 else {}


def failure(error: ArborError) -> Record:
    """The record of a search that ended with an error."""
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
        "evicted": metrics.evicted_tokens,
        "streamed_bytes": metrics.streamed_bytes,
        "bytes_per_token": metrics.bytes_per_token,
        "steps": metrics.steps,
        "peak": metrics.peak_tokens,
        "budget": metrics.budget_tokens,
        "over": metrics.peak_tokens > metrics.budget_tokens,
        "finish": solution.finish_reason,
    }
