"""Recording what is not an arm: how attention is spread, what a gate or a similar prompt would
decide, and what a block's loss costs; one record for each problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from eval_attention import THRESHOLDS
from similar_pairs import Probing, pairs_of

from arbor import Solver
from arbor.errors import ArborError
from arbor.measure.evaluation.dataset import Sample
from arbor.papers.arborkv.calibrate import Example, collect
from arbor.papers.lazyeviction.calibrate import PathReads, path_reads
from arbor.papers.rksc.calibration import Recorder, Verification

from .measuring import Measuring, Record, failure


class Recording:
    """Records of the problems of a dataset, next to those of the arms.

    Args:
        measuring: the model, its checkpoint and the records.
        samples: the problems.
    """

    def __init__(self, measuring: Measuring, samples: Sequence[Sample]) -> None:
        self._measuring = measuring
        self._samples = samples
        self._solvers: dict[str, Solver] = {}
        self._probing: Probing | None = None
        self._kinds: Mapping[str, Callable[[int], Record]] = {
            "attention": self._attention,
            "gates": self._gates,
            "sharing": self._sharing,
            "weights": self._weights,
        }

    def record(self, experiment: str) -> int:
        """Record what is missing of an experiment; returns how many problems were missing.

        Raises:
            ArborError: the model cannot be loaded.
        """
        make = self._kinds.get(experiment)
        if make is None:
            return 0
        records, missing = self._measuring.records, 0
        for place, sample in enumerate(self._samples):
            if records.get(sample.id, experiment) is not None:
                continue
            missing += 1
            try:
                found = {"error": "", **make(place)}
            except ArborError as error:
                found = failure(error)
            records.add(sample.id, experiment, found)
            if missing == 1 or place % 10 == 9:
                print(f"{experiment}: problem {place + 1} of {len(self._samples)}", flush=True)
        self._solvers.clear()
        self._probing = None
        return missing

    def _solver(self, name: str, search: str, **settings: Any) -> Solver:
        if name not in self._solvers:
            self._solvers[name] = self._measuring.solver(search, **settings)
        return self._solvers[name]

    def _attention(self, place: int) -> Record:
        """MRI at each threshold and the attention that every token of a greedy chain received."""
        problem = self._samples[place].problem
        assert problem is not None, "samples were read with their problems"
        solver = self._solver("attention", "chain", policy="lazyeviction", budget="full")
        found = next(path_reads(solver, [problem], THRESHOLDS))
        return {
            "prompt": found[0].prompt,
            "mass": np.round(found[0].mass, 6).tolist(),
            "intervals": [each.intervals.tolist() for each in found],
        }

    def _gates(self, place: int) -> Record:
        """Every thought verified in full, and what each layer would say."""
        sample, recorder = self._samples[place], Recorder()
        assert sample.problem is not None, "samples were read with their problems"
        solver = self._measuring.solver("tot-bfs", verifier=recorder, budget="full")
        recorder.solver = solver
        solver.solve(sample.problem, expected=sample.expected)
        return {"verifications": [dataclasses.asdict(each) for each in recorder.found]}

    def _sharing(self, place: int) -> Record:
        """How similar a prompt is to others, by each reading of the similarity."""
        following = self._samples[(place + 1) % len(self._samples)].problem
        problem = self._samples[place].problem
        assert problem is not None and following is not None, "samples were read with problems"
        if self._probing is None:
            solver = self._solver(
                "sharing", "chain", mode="lossy", share="similar", policy="streaming"
            )
            every = [each.problem for each in self._samples if each.problem is not None]
            self._probing = Probing(solver, every)
        kinds = pairs_of(self._probing.task, problem, following, seed=place)
        return {
            "pairs": [
                {"kind": kind, "reading": reading, **dataclasses.asdict(pair)}
                for kind, two in kinds.items()
                for reading, pair in self._probing.compare(two).items()
            ]
        }

    def _weights(self, place: int) -> Record:
        """MSVE's features of each block of a right greedy chain, and what masking it costs."""
        problem = self._samples[place].problem
        assert problem is not None, "samples were read with their problems"
        solver = self._solver(
            "weights", "chain", policy="arborkv", verifier="self", mode="lossy", budget="full"
        )
        return {"blocks": [dataclasses.asdict(each) for each in collect(solver, [problem])]}


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


def reads_of(record: Mapping[str, Any]) -> list[PathReads]:
    """How a path was read, at each of `THRESHOLDS`."""
    mass = np.array(record["mass"], float)
    return [
        PathReads(np.array(each, np.int64), mass, record["prompt"]) for each in record["intervals"]
    ]


def examples_of(record: Mapping[str, Any], problem: int) -> list[Example]:
    """The masked blocks of a record, as `calibrate` reads them."""
    return [Example(**{**each, "problem": problem}) for each in record.get("blocks", ())]
