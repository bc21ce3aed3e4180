"""Pairs of prompts, and how similar the model's states of them are (RKSC, arXiv 2606.09937)."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from arbor import Solver
from arbor.engine.engine import Engine
from arbor.events import Compared
from arbor.memory.pool import KVPool
from arbor.model.plan import Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.papers.rksc.similar_prompts import SimilarPrompts, differing, similarity
from arbor.tasks.base import Problem, Task
from arbor.tasks.chains import Chains, Fact, chain_to
from arbor.tree import ThoughtTree

LARGEST_START = 20  # of a number that a problem of `chains` gives
NUMBER = re.compile(r"\d+")
Two = tuple[Problem, Problem]


@dataclass(frozen=True)
class Pair:
    """Two prompts under one reading of the similarity.

    Attributes:
        similarity: sigma.
        same: whether both have the same answer.
        saved: tokens of the second prompt that sharing would not run, beyond the common beginning.
        spent: tokens that the comparison runs, in tokens through all layers.
        length: tokens of the second prompt.
    """

    similarity: float
    same: bool
    saved: int
    spent: float
    length: int


def pairs_of(task: Task, problem: Problem, following: Problem, seed: int) -> dict[str, Two]:
    """A problem with one number changed, which has another answer, and with another problem; of
    `chains` also with its facts in another order, which has the same.

    Args:
        task: reads the changed text.
        problem: the first of each pair.
        following: another one of the data set.
        seed: of the change.
    """
    rng = random.Random(seed)
    if isinstance(task, Chains):
        return _of_chains(task, problem, rng) | {"another problem": (problem, following)}
    numbers = list(NUMBER.finditer(problem.text))
    found: dict[str, Two] = {"another problem": (problem, following)}
    if numbers:
        one = rng.choice(numbers)
        other = str(int(one[0]) + rng.randint(1, 9))
        text = problem.text[: one.start()] + other + problem.text[one.end() :]
        found["one number changed"] = (problem, task.parse(text))
    return found


def _of_chains(task: Chains, problem: Problem, rng: random.Random) -> dict[str, Two]:
    facts, asked = task.facts(problem), problem.data["asked"]
    order = list(facts)
    while order == facts:
        rng.shuffle(order)
    start = next(fact for fact in chain_to(facts, asked) if fact.kind == "is")
    given = [k for k in range(1, LARGEST_START + 1) if k != start.amount]
    changed = Fact(start.who, "is", rng.choice(given), ())
    edited = task.make([changed if fact is start else fact for fact in facts], asked)
    assert edited.expected != problem.expected, "every later quantity grows with the first"
    return {
        "another order": (problem, task.make(order, asked)),
        "one number changed": (problem, edited),
    }


class Probing:
    """Compares prompts by several readings of the similarity.

    Args:
        solver: shares similar prompts.
        problems: all whose prompts may come; the longest decides the room.
    """

    def __init__(self, solver: Solver, problems: Sequence[Problem]) -> None:
        solver.load()
        self.task = solver.task
        self._engine = solver.engine
        self._runner = self._engine.runner
        longest = max(len(self._ids(each)) for each in problems)
        self._room = 3 * longest + 64  # both prompts and the probe; a changed number may be longer
        self._serial = itertools.count()
        runner = self._runner
        self._pool = KVPool(runner.layer_kv, self._room, runner.dtype, runner.device)
        self._probes = {
            "differing tokens, first quarter of the layers": SimilarPrompts(
                runner, solver.tokenizer
            ),
            "differing tokens, all layers": SimilarPrompts(runner, solver.tokenizer, probed=1.0),
        }

    def _ids(self, problem: Problem) -> list[int]:
        return self._engine.encode(self.task.prompt(problem))

    def compare(self, two: Two) -> Mapping[str, Pair]:
        """A pair under each reading; probes have none of two prompts that are equal."""
        same = two[0].expected == two[1].expected and two[0].expected is not None
        ids = [self._ids(problem) for problem in two]
        length, begin = len(ids[1]), differing(*map(np.array, ids))[0]
        found = {}
        for reading, probe in self._probes.items():
            slots = self._room + next(self._serial) % 2
            compared = _compared(self._engine, probe, ids, slots)
            if compared is not None:
                spent = compared.rows * compared.layers / self._runner.layer_count
                found[reading] = Pair(compared.similarity, same, length - begin, spent, length)
        one, other = (_hidden_states(self._runner, self._pool, each) for each in ids)
        for reading, sigma in {
            "mean of all tokens, all layers": similarity(one.mean(1), other.mean(1)),
            "last token, all layers": similarity(one[:, -1], other[:, -1]),
        }.items():  # the second prompt has been run by then, and nothing is saved
            found[reading] = Pair(float(sigma), same, length - begin, length, length)
        return found


def _compared(
    engine: Engine, similar: SimilarPrompts, prompts: Sequence[list[int]], slots: int
) -> Compared | None:
    """Two prompts compared as a search would; a pool of another size holds nothing else."""
    one, other = (ThoughtTree(ids) for ids in prompts)
    engine.open(one, slots)
    engine.extend(one.root)
    engine.finish(one)
    engine.open(other, slots)
    found = similar.compare(engine.memory, other)
    engine.close(other)
    return None if found is None else found[0]


def _hidden_states(runner: ModelRunner, pool: KVPool, ids: list[int]) -> torch.Tensor:
    """The states of a prompt after each layer, [layers, tokens, d] float32."""
    slots = np.arange(len(ids), dtype=np.int32)
    segment = Segment((), ids, np.arange(len(ids)), slots, slots, logits=1)
    every = list(range(runner.layer_count))
    found = runner.forward(plan_forward([segment]), pool, hidden=every).hidden
    return torch.stack([found[layer].float() for layer in every])
