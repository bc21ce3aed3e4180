"""Trains a model by the rewards of its own trees or chains; measures its chains before and after.

    python scripts/train_on_trees.py --work build/trees --controller eptree,chains=4,forks=6,width=2
    python scripts/train_on_trees.py --work build/chains --controller chain,samples=16
    python scripts/train_on_trees.py --compare build/trees-* --with build/chains-*

A step searches some puzzles of the training split, each by one tree, and changes the weights once:
Adam on the policy gradient, the mean over tokens of log probability times advantage
(`Rollout.advantages`), each token as often as finished paths go through it. One forward computes a
tree (`Rollout.mask`). Training ends with `--tokens` generated or after `--minutes` of CPU time.

Started again with the same `--work`, it goes on from the last checkpoint, and with nothing left to
train it only measures. Trainings of several seeds are compared pair by pair, in the order given.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_and_problems import (
    add_model_and_problems,
    problems_of,
    settings_of,
    task_of,
    verifier_of_chains,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from arbor import Solver
from arbor.measure.statistics import bootstrap
from arbor.model.loading import BUILTIN
from arbor.run.rollout import Rollout

Shares = np.ndarray[Any, Any]  # of each problem

INDEPENDENT = {"temperature": 1.0, "arithmetic": False}
TRAINED = 2000  # problems of the training split
MEASURED = 10**9  # seed of the chains that are measured
RESAMPLES = 10_000
CHECKPOINT = "checkpoint.pt"
LOG = "log.csv"
BEFORE, AFTER = "before.npy", "after.npy"  # share of right chains of each problem


class Training:
    """A model in training: its weights and their optimiser, and what that has cost so far.

    Attributes:
        model: of transformers, in float32.
        step: changes of the weights.
        generated: tokens sampled for them.
        computed: tokens whose KV the searches computed.
        trained: sampled tokens of finished paths, each path by itself.
        packed: tokens of the trees, which one forward each computes.
        unpacked: tokens of their finished paths, each path by itself.
        seconds: of CPU time.
    """

    def __init__(self, start: str, rate: float) -> None:
        place = BUILTIN.get(start.removeprefix("builtin:"), start)
        self.model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        self._optimiser = torch.optim.Adam(self.model.parameters(), lr=rate, betas=(0.9, 0.95))
        self.step = self.generated = self.computed = self.trained = 0
        self.packed = self.unpacked = 0
        self.seconds = 0.0

    def learn(self, rollouts: list[Rollout]) -> None:
        """Change the weights once."""
        add_gradients(self.model, rollouts)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        for each in rollouts:
            cost, passes = each.solution.metrics, each.paths[each.blocks]
            self.generated += cost.tokens_generated
            self.computed += cost.tokens_generated + cost.tokens_given
            self.computed += cost.tokens_prefilled + cost.tokens_recomputed
            self.trained += int(passes[each.sampled].sum())
            self.packed += len(each.tokens)
            self.unpacked += int(passes.sum())

    def save(self, file: Path) -> None:
        """Write all of it; a former file stays until it is whole."""
        state: dict[str, Any] = {
            name: value for name, value in vars(self).items() if isinstance(value, int | float)
        }
        state["weights"] = self.model.state_dict()
        state["optimiser"] = self._optimiser.state_dict()
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def restore(self, file: Path) -> None:
        """Go on from what was saved."""
        state = torch.load(file, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state.pop("weights"))
        self._optimiser.load_state_dict(state.pop("optimiser"))
        vars(self).update(state)


def add_gradients(model: Any, rollouts: list[Rollout]) -> None:
    """Of minus the mean over the sampled tokens of all finished paths, each path by itself, of log
    probability times advantage."""
    total = sum(int(each.paths[each.blocks][each.sampled].sum()) for each in rollouts)
    for rollout in rollouts:
        factors = (rollout.advantages() * rollout.paths)[rollout.blocks] * rollout.sampled
        if factors.any():
            found = log_probabilities(model, rollout)
            loss = -(found * torch.from_numpy(factors).float()).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]


def log_probabilities(model: Any, rollout: Rollout) -> Tensor:
    """Of each token after those before it on its path, [n], by one forward; 0 for the first."""
    before = np.arange(-1, len(rollout.tokens) - 1)
    before[rollout.starts[1:-1]] = rollout.starts[rollout.parents[1:] + 1] - 1
    tokens = torch.from_numpy(rollout.tokens)
    logits = model(
        input_ids=tokens[None],
        position_ids=torch.from_numpy(rollout.positions)[None],
        attention_mask=torch.where(torch.from_numpy(rollout.mask()), 0.0, -1e9)[None, None],
    ).logits[0]
    each = torch.log_softmax(logits[before[1:]], -1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([each.new_zeros(1), each])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="checkpoint, log and what was measured")
    add_model_and_problems(parser)
    parser.add_argument("--controller", default="eptree,chains=4,forks=6,width=2")
    parser.add_argument("--puzzles", type=int, default=8, help="of a step")
    parser.add_argument("--minutes", type=float, default=10, help="most CPU time of training")
    parser.add_argument("--tokens", type=int, help="most generated tokens; any number if left out")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=int, default=200, help="problems of the test split")
    parser.add_argument("--samples", type=int, default=8, help="chains of each of them")
    parser.add_argument("--compare", type=Path, nargs="+", help="trainings; none begins")
    parser.add_argument("--with", type=Path, nargs="+", dest="other", help="as many others")
    args = parser.parse_args()
    if args.compare:
        if len(args.other or ()) != len(args.compare):
            parser.error("--with names as many trainings as --compare")
        compare(args.compare, args.other)
        return
    if args.work is None:
        parser.error("--work names the folder of the checkpoint")
    if args.model.endswith(".gguf"):
        parser.error("--model is a GGUF file: give a directory of safetensors, or a Hub id")
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    training = Training(args.model, args.rate)
    checkpoint = args.work / CHECKPOINT
    common = settings_of(args) | {"sampling": INDEPENDENT, "dtype": "float32", "threads": 1}
    common["verifier"] = verifier_of_chains(task_of(args))
    chains = f"chain,samples={args.samples}"

    def measured(name: str) -> Shares:
        with Solver(controller=chains, seed=MEASURED, **common) as solver:
            solver.update_weights(training.model.state_dict())
            problems = problems_of(args, solver.task, args.measure)
            shares = np.array([each.rewards.mean() for each in solver.rollouts(problems)])
        np.save(args.work / name, shares)
        return shares

    kept = args.work / BEFORE
    before = np.load(kept) if kept.exists() else np.empty(0)
    if len(before) != args.measure:
        before = measured(BEFORE)
    if checkpoint.exists():
        training.restore(checkpoint)
    with Solver(controller=args.controller, **common) as solver:
        puzzles = problems_of(args, solver.task, TRAINED, "train")
        began = time.process_time() - training.seconds
        while time.process_time() - began < 60 * args.minutes:
            if args.tokens is not None and training.generated >= args.tokens:
                break
            solver.update_weights(training.model.state_dict())
            first = training.step * args.puzzles
            problems = [puzzles[(first + i) % len(puzzles)] for i in range(args.puzzles)]
            seed = 1_000_000 * args.seed + first
            rollouts = list(solver.rollouts(problems, seed=seed))
            training.learn(rollouts)
            training.seconds = time.process_time() - began
            training.save(checkpoint)
            right = np.mean([each.rewards.mean() for each in rollouts])
            note(args.work / LOG, training, float(right))
    after = measured(AFTER)
    for name, values in (("before", before), ("after", after), ("difference", after - before)):
        low, high = bootstrap(values)
        print(f"{name}: {100 * values.mean():.1f} % ({100 * low:.1f} to {100 * high:.1f})")
    print(
        f"{training.step} steps, {training.seconds:.0f} s; tokens: {training.generated:,} generated, "
        f"{training.computed:,} computed, {training.trained:,} trained, {training.packed:,} in trees, "
        f"{training.unpacked:,} in paths"
    )


def compare(some: list[Path], others: list[Path]) -> None:
    """Print by how much more some trainings gained than others, with a 95 % interval.

    Pairs are of a seed and of a problem. Resampled are seeds and problems, each by itself, so that
    the interval is one of other seeds and other problems; of few seeds it is narrow.
    """
    gains = [np.load(each / AFTER) - np.load(each / BEFORE) for each in some + others]
    pairs = np.array(gains[: len(some)]) - np.array(gains[len(some) :])
    drawn = np.random.default_rng(0)
    means = [
        pairs[np.ix_(*(drawn.integers(n, size=n) for n in pairs.shape))].mean()
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(means, (2.5, 97.5))
    print("each seed: " + ", ".join(f"{100 * each:.1f}" for each in pairs.mean(1)))
    print(f"difference: {100 * pairs.mean():.1f} points ({100 * low:.1f} to {100 * high:.1f})")


def note(log: Path, training: Training, right: float) -> None:
    """Append a line to the log."""
    names = ("step", "seconds", "generated", "computed", "trained", "packed", "unpacked")
    new = not log.exists()
    with log.open("a", newline="") as lines:
        table = csv.writer(lines)
        if new:
            table.writerow((*names, "right"))
        table.writerow((*(round(getattr(training, name), 1) for name in names), round(right, 4)))


if __name__ == "__main__":
    main()
