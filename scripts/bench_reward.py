"""Cost of a reward model whose tree mirrors the search's, against each path from nothing.

    python scripts/bench_reward.py --only trees --rounds 5 --csv rows.csv
    python scripts/bench_reward.py --only searches --problems 8 --csv rows.csv

`trees`: a beam search of random steps, 4 leaves with 4 children of 32 tokens each, a prompt of 128
tokens, scored level by level by the built-in model (the logits of two tokens). `mirror`: in the
reward model's engine, which keeps the KV of paths, at full retention and in a quarter of it;
`nothing`: every path whole, in the same engine; `transformers`: every path whole, a padded batch a
level, by transformers' own forward. Methods take turns within a round; times are CPU time of the
thread, one thread. Scores are compared. A row of the CSV is one measurement.

`searches`: problems solved with the built-in model as its own process reward model: the share of
the wall time that its forwards take, and the tokens it computed of those of its paths.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, task_of
from torch import Tensor

from arbor import Solver
from arbor.budget import Budget, Footprint
from arbor.engine.engine import Engine
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.linear.layers import pack_linears
from arbor.model.loading import load_model, load_tokenizer, locate_model
from arbor.model.runner import ModelRunner
from arbor.model.scoring import TokenScores
from arbor.retention.policy import POLICIES
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.reward.engine import values_of
from arbor.verifiers.reward.mirror import Mirror
from arbor.verifiers.reward_model import ProcessRewardModel

PROMPT, STEP, BEAM, WIDTH = 128, 32, 4, 4
SEARCHES = (("game24", "tot"), ("chains", "beam"), ("chains", "dpts"))
AS_JUDGE: dict[str, Any] = {
    "family": "trl",
    "head": "tags",
    "prompt": "{prompt}",
    "good": " yes",
    "bad": " no",
}
Scores = list[float]


class Levels:
    """A beam search of random steps, the same for every method.

    Args:
        depth: levels.
        vocabulary: token ids are below it.
        seed: of the steps and of the choice of leaves.

    Attributes:
        prompt: token ids.
        levels: the candidates of each level.
        pruned: the candidates that are given up after each level.
    """

    def __init__(self, depth: int, vocabulary: int, seed: int) -> None:
        rng = random.Random(seed)
        self.prompt = [rng.randrange(3, vocabulary) for _ in range(PROMPT)]
        tree = ThoughtTree([0])
        leaves, self.levels, self.pruned = [tree.root], [], []
        for _ in range(depth):
            level: list[Node] = []
            for leaf in leaves:
                for _ in range(WIDTH):
                    child = tree.fork(leaf)
                    child.text = " ".join(str(rng.randrange(3, vocabulary)) for _ in range(STEP))
                    child.state = NodeState.CLOSED
                    level.append(child)
            leaves = rng.sample(level, BEAM)
            self.levels.append(level)
            self.pruned.append([node for node in level if node not in leaves])

    def path(self, node: Node) -> list[int]:
        """Token ids of a whole path."""
        return self.prompt + [int(word) for text in node.thoughts for word in text.split()]


def step_tokens(text: str, *, first: bool) -> list[int]:
    """The ids that a text of `Levels` names."""
    return [int(word) for word in text.split()]


def mirrored(engine: Engine, levels: Levels, part: float) -> tuple[list[Scores], int, int]:
    """Scores by a mirror of the tree, with the tokens computed and recomputed."""
    full = PROMPT + STEP * sum(len(level) for level in levels.levels)
    slots = max(int(part * full), PROMPT + STEP * len(levels.levels))
    plan = Budget("tokens", slots).plan(Footprint(PROMPT, STEP, len(levels.levels), full), 1)
    mirror = Mirror(
        engine,
        levels.prompt,
        [],
        step_tokens,
        lambda scores: values_of(scores, 0),
        "last",
        context=1 << 20,
        plan=plan,
        pool=slots,
        verifier="prm",
        emit=lambda event: None,
        explain=lambda error: error,
    )
    found = []
    for level, pruned in zip(levels.levels, levels.pruned, strict=True):
        scoring = mirror.begin(level)
        while not scoring.done:
            engine.step()
        found.append(list(scoring.verdict().values))
        mirror.forget(pruned)
    mirror.close()
    engine.memory.free_kept_prompts(engine.memory.slots)  # the next measurement computes the prompt
    return found, mirror.cost.computed, mirror.cost.recomputed


def from_nothing(engine: Engine, levels: Levels) -> tuple[list[Scores], int, int]:
    """Scores of each path computed whole, a level in one call, in the same engine."""
    found, tokens = [], 0
    for level in levels.levels:
        paths = [levels.path(node) for node in level]
        longest = sum(map(len, paths))
        tree = ThoughtTree(levels.prompt[:1])
        engine.open(tree, longest)
        scores = engine.ask([tree.root] * len(paths), [path[1:] for path in paths])
        found.append(values_of(scores, 0))
        engine.close(tree)
        tokens += longest
    return found, tokens, 0


@torch.inference_mode()
def by_transformers(
    model: Any, tags: Sequence[int], levels: Levels
) -> tuple[list[Scores], int, int]:
    """Scores of each path computed whole, a level in one batch, by transformers."""
    found, tokens = [], 0
    for level in levels.levels:
        ids = torch.tensor([levels.path(node) for node in level])  # equally long: no padding
        hidden: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
        found.append(values_of(model.lm_head(hidden)[:, list(tags)].float(), 0))
        tokens += ids.numel()
    return found, tokens, 0


def trees(given: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    source = locate_model(given.model)
    tokenizer = load_tokenizer(source)
    tags = [tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in ("yes", "no")]
    cpu = torch.device("cpu")
    own = load_model(source, torch.float32, cpu)
    scoring = TokenScores(load_model(source, torch.float32, cpu), tags)
    engine = Engine(ModelRunner(scoring, TorchCascade()), tokenizer, policy=POLICIES["reentry"])
    pack_linears(scoring)
    for depth in given.depths:
        levels = Levels(depth, int(own.config.vocab_size), seed=depth)
        methods: dict[str, Callable[[], tuple[list[Scores], int, int]]] = {
            "mirror": partial(mirrored, engine, levels, 1.0),
            "mirror, 0.25": partial(mirrored, engine, levels, 0.25),
            "nothing": partial(from_nothing, engine, levels),
            "transformers": partial(by_transformers, own, tags, levels),
        }
        wanted = [score for level in methods["transformers"]()[0] for score in level]
        whole = sum(len(levels.path(node)) for level in levels.levels for node in level)
        seconds: dict[str, list[float]] = defaultdict(list)
        counts: dict[str, tuple[int, int]] = {}
        for index in range(given.rounds):
            for name in list(methods)[:: 1 if index % 2 == 0 else -1]:
                began = time.thread_time()
                found, tokens, recomputed = methods[name]()
                seconds[name].append(time.thread_time() - began)
                scores = [score for level in found for score in level]
                error = max(abs(a - b) for a, b in zip(scores, wanted, strict=True))
                assert error < 1e-3, f"{name}: {error}"
                counts[name] = tokens, recomputed
                write(
                    {
                        "case": f"depth {depth}",
                        "method": name,
                        "round": index,
                        "cpu_s": round(seconds[name][-1], 4),
                        "tokens": tokens,
                        "path_tokens": whole,
                        "recomputed": recomputed,
                        "error": f"{error:.1g}",
                        "share": "",
                        "n": 1,
                        "n_of": "trees",
                    }
                )
        for name in methods:
            ratios = [b / a for a, b in zip(seconds["mirror"], seconds[name], strict=True)]
            print(
                f"depth {depth}, {name}: {statistics.median(seconds[name]):.3f} s, "
                f"{statistics.median(ratios):.2f} of mirror ({min(ratios):.2f} to {max(ratios):.2f}), "
                f"{counts[name][0]:,} tokens, {counts[name][1]:,} of them again, "
                f"{counts[name][0] / counts['mirror'][0]:.2f} of mirror",
                flush=True,
            )


def searches(given: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    own = given.dataset is None and given.task is None
    several = SEARCHES if own else [(task_of(given), name) for name in ("tot", "beam")]
    for task, controller in several:
        for budget in ("full", 0.25):
            verifier = ProcessRewardModel(given.model, budget=budget, **AS_JUDGE)
            with Solver(
                given.model, task=task, controller=controller, verifier=verifier, threads=1
            ) as solver:
                problems = problems_of(given, solver.task, given.problems)
                solver.solve(problems[0])
                metrics = [solver.solve(problem).metrics for problem in problems]
            wall_s, reward_s = sum(m.wall_s for m in metrics), sum(m.reward_s for m in metrics)
            whole = sum(m.reward_path_tokens for m in metrics)
            computed = sum(m.reward_tokens for m in metrics)
            row = {
                "case": f"{task}, {controller}",
                "method": f"mirror, {budget}",
                "round": 0,
                "cpu_s": "",
                "tokens": computed,
                "path_tokens": whole,
                "recomputed": sum(m.reward_recomputed for m in metrics),
                "error": "",
                "share": round(reward_s / wall_s, 4),
                "n": len(problems),
                "n_of": "problems",
            }
            write(row)
            print(
                f"{task}, {controller}, budget {budget}: {100 * reward_s / wall_s:.1f} % of the wall "
                f"time, {computed:,} tokens of {whole:,} from nothing ({whole / computed:.2f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["trees", "searches"])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 6, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=8)
    add_model_and_problems(parser, task=None)
    add_options(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(given)
    if given.only in (None, "trees"):
        trees(given, table.add)
    if given.only in (None, "searches"):
        searches(given, table.add)


if __name__ == "__main__":
    main()
