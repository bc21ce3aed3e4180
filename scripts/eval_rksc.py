"""What RKSC (arXiv 2606.09937) claims, measured: gates, layers, similar prompts, its pipeline.

    # risk and coverage of the gates that skip a verification
    python scripts/eval_rksc.py gates --n 350 --calibration 120 --csv rows.csv
    # decisions by the layer that questions leave after, with and without the final norm
    python scripts/eval_rksc.py layers --n 350 --csv rows.csv
    # paraphrases, and prompts that differ in one number, by threshold
    python scripts/eval_rksc.py share --n 500 --csv rows.csv
    # 8 branches over 1,024 tokens, step by step from no sharing to the whole pipeline
    python scripts/eval_rksc.py pipeline --size 100m --rounds 7 --csv rows.csv
    # the same steps in tree searches of the built-in model
    python scripts/eval_rksc.py searches --n 20 --rounds 3 --csv rows.csv

`gates` and `layers` solve problems with full verification (Tree of Thoughts, verifier `self`) and
compare each verification with what a gate or an earlier layer would have decided: a disagreement
prefers a candidate whose full value is lower, a clear one by more than 0.05. Thresholds come from
problems of the training split, figures from the test split (of a data set: its splits for
calibration and evaluation). Bounds are Clopper and Pearson's,
one-sided, at 95 %.

`share` compares a prompt, without `--dataset` of `chains`, with a second one: one number changed
(another answer), another problem, or, of `chains`, its facts in another order (the same answer). A
second prompt that shares is answered from the first one's text, which is wrong where the answers
differ.

`pipeline` runs each stage alone, in turn within each round; its times are thread CPU time.
Baselines do the same work in each stage: no hidden states, no unembedding beyond that of the
answers. Weights are random, so whether a verification is skipped is set, not decided; questions
leave after two thirds of the layers, looked at by the margin of two verdicts after every layer.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_exit import FixedExit
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of
from random_llama import SIZES, NoText, fixed_length, prefix, random_llama
from rounds import interval
from similar_pairs import Pair, Probing, pairs_of

from arbor import Solver
from arbor.engine.engine import Engine
from arbor.engine.operation import GivenBlock, Growth, Operation
from arbor.events import preferred
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.linear.layers import pack_linears
from arbor.measure.statistics import clopper_pearson
from arbor.measure.timing import interleaved
from arbor.model.runner import ModelRunner
from arbor.model.sampling_params import Sampling
from arbor.papers.rksc.calibration import (
    Recorder,
    Verification,
    calibrate_exit,
    collect_verifications,
)
from arbor.papers.rksc.cgee import CGEE, RELEASE_ABSOLUTE, RELEASE_RELATIVE
from arbor.papers.rksc.exit_thresholds import LayerExit
from arbor.papers.rksc.exit_watch import ways_of
from arbor.registry import resolve
from arbor.tasks.chains import Chains
from arbor.tree import Node, ThoughtTree

Row = dict[str, Any]
CLEAR = 0.05  # loss of value from which a disagreement is a clear one
RISK = 0.005  # of the paper's goal: 6 of 1,616 verifications, 0.37 %
STEPS = 20  # thresholds of a curve
THRESHOLDS = (0.70, 0.80, 0.82, 0.90, 0.95, 0.98)  # of similarity; the paper's sweep, and more
BRANCHES, SUFFIX, QUESTION = 8, 16, 16  # of the paper's setting
LEAST_DECODED = 3  # tokens after which the released code may stop all branches
VERDICTS = (5, 6)  # token ids of the random model
SEARCHES: dict[str, dict[str, Any]] = {
    "tot": {"controller": "tot"},
    "beam": {"controller": {"name": "beam", "beam_size": 5, "width": 4}},
    "dpts": {"controller": {"name": "dpts", "max_visited": 60}},
}
# of the calibration in docs/experiments/rksc.md, by the paper's percentiles
PAPER_GATE = CGEE(confidence=0.9962, gap=0.0006)
PAPER_EXIT = LayerExit(threshold=0.198, patience=1)


def upper(wrong: int, n: int) -> float:
    """The one-sided 95 % upper bound of a share."""
    return clopper_pearson(wrong, n, 0.90)[1]


def collected(
    args: argparse.Namespace, split: str, n: int, norm: bool = True
) -> list[Verification]:
    """The verifications of the first n problems of a split."""
    recorder = Recorder(norm=norm)
    with Solver(**settings_of(args), controller="tot", verifier=recorder) as solver:
        return collect_verifications(solver, problems_of(args, solver.task, n, split))


# Gates


def gates(args: argparse.Namespace) -> Iterator[Row]:
    """Every gate's coverage and disagreement: curves, and the settings in use."""
    held = collected(args, "train", args.calibration)
    found = [each for each in collected(args, "test", args.n) if each.gap is not None]
    first = np.array([each.confidence for each in found])
    relative = np.array([each.gap for each in found], float)
    absolute = np.round(first * relative, 4)
    lost = np.array([max(each.values) - each.values[each.confident] for each in found])
    wrong = lost > 0

    def row(gate: str, setting: str, skipped: np.ndarray) -> Row:
        decided, bad = int(skipped.sum()), int((skipped & wrong).sum())
        return {
            "gate": gate,
            "setting": setting,
            "coverage_percent": round(100 * decided / len(found), 2),
            "decided": decided,
            "disagreements": bad,
            "disagree_percent": round(100 * bad / len(found), 3),
            "bound_percent": round(100 * upper(bad, len(found)), 3),
            "of_skipped_percent": round(100 * bad / decided, 1) if decided else "",
            "clear_disagreements": int((skipped & (lost > CLEAR)).sum()),
            "n": len(found),
            "n_of": f"verifications of {args.n} problems",
        }

    for step in range(STEPS + 1):
        share = 1 - step / STEPS
        c, r, a = (float(np.quantile(each, share)) for each in (first, relative, absolute))
        yield row("confidence alone", f"p1 >= {c:.4f}", first >= c)
        yield row("relative gap alone", f"gap >= {r:.4f}", relative >= r)
        yield row("absolute gap alone", f"p1 - p2 >= {a:.4f}", absolute >= a)
        both, either = (first >= c) & (relative >= r), (first >= c) | (relative >= r)
        yield row("and, equal quantiles", f"p1 >= {c:.4f} and gap >= {r:.4f}", both)
        yield row("or, equal quantiles", f"p1 >= {c:.4f} or gap >= {r:.4f}", either)
    (one, apart), (other, share) = RELEASE_ABSOLUTE, RELEASE_RELATIVE
    released = ((first >= one) & (absolute >= apart)) | ((first >= other) & (relative >= share))
    yield row("released code (or)", "as printed there", released)
    chosen = calibrate_exit(held, risk=RISK)
    paper = chosen.paper
    taken = (first >= paper.confidence) & (relative >= paper.gap)
    yield row("paper's percentiles", f"{paper.confidence:.4f}, {paper.gap:.4f}", taken)
    for risk in (RISK, 0.02, 0.05):
        safe = calibrate_exit(held, risk=risk).risk
        taken = (first >= safe.confidence) & (relative >= safe.gap)
        setting = f"{safe.confidence:.4f}, {safe.gap:.4f}"
        yield row(f"risk-controlled, {risk:.1%}", setting, taken)


def best_coverage(rows: Sequence[Row], column: str) -> Iterator[str]:
    """For each gate the largest coverage whose disagreement is at most `RISK` of all
    verifications, by the share itself or by its bound."""
    for gate in dict.fromkeys(row["gate"] for row in rows):
        safe = [
            row["coverage_percent"]
            for row in rows
            if row["gate"] == gate and row[column] <= 100 * RISK
        ]
        yield f"{gate}: {max(safe, default=0)} % at {column} <= {100 * RISK:g}"


# Layers


def layers(args: argparse.Namespace) -> Iterator[Row]:
    """Decisions had all questions left after a layer, and under the paper's rule."""
    for norm in (True, False):
        held = collected(args, "train", args.calibration, norm)
        found = collected(args, "test", args.n, norm)
        yield from layer_rows(found, calibrate_exit(held, norm=norm).paper.exit_rule, args.n)


def layer_rows(found: Sequence[Verification], rule: LayerExit, problems: int) -> Iterator[Row]:
    """A row for each layer, and one for a rule.

    Args:
        found: verifications, at least one.
        rule: of the last row; its `norm` is that of the verifications.
        problems: that they are of.
    """
    depth = len(found[0].by_layer) + 1
    for layer in range(1, depth):
        lost = [_lost(each, [layer] * len(each.uncertainties)) for each in found]
        unsure = [u[layer - 1] for each in found for u in each.uncertainties]
        yield {
            "norm": rule.norm,
            "rule": "all leave",
            "layer": layer,
            "layers": depth,
            "uncertainty_mean": round(float(np.mean(unsure)), 4),
            "saved_percent": round(100 * (1 - layer / depth), 1),
            **_share(lost, problems),
        }
    ends = [each.leaves_at(rule) for each in found]
    flat = [end for each in ends for end in each]
    yield {
        "norm": rule.norm,
        "rule": f"paper's median, threshold {rule.threshold:g}",
        "layer": round(float(np.mean(flat)), 2),
        "layers": depth,
        "uncertainty_mean": "",
        "saved_percent": round(100 * (1 - float(np.mean(flat)) / depth), 1),
        **_share([_lost(each, end) for each, end in zip(found, ends, strict=True)], problems),
    }


def _lost(each: Verification, ends: Sequence[int]) -> float:
    """How much less than the best candidate the one is worth, in full, that is preferred if
    questions leave after these layers."""
    return max(each.values) - each.values[preferred(each.valued(ends))]


def _share(lost: Sequence[float], problems: int) -> Row:
    wrong, n = sum(each > 0 for each in lost), len(lost)
    return {
        "disagreements": wrong,
        "disagree_percent": round(100 * wrong / n, 2),
        "bound_percent": round(100 * upper(wrong, n), 2),
        "clear_disagreements": sum(each > CLEAR for each in lost),
        "n": n,
        "n_of": f"verifications of {problems} problems",
    }


# Similar prompts


def share(args: argparse.Namespace) -> Iterator[Row]:
    """The part of pairs that share at each threshold, and of these the wrong ones."""
    # of `chains` prompts of more than the 32 tokens from which they are kept
    usual = args.dataset is None and args.task is None
    task = {"task": Chains(fewest=4, most=8)} if usual else {}
    settings = settings_of(args) | task
    found: dict[tuple[str, str], list[Pair]] = {}
    with Solver(**settings, mode="lossy", share="similar", policy="streaming") as solver:
        problems = problems_of(args, solver.task, args.n + 1)
        probing = Probing(solver, problems)
        for place, (problem, following) in enumerate(itertools.pairwise(problems)):
            for kind, two in pairs_of(solver.task, problem, following, seed=place).items():
                for reading, pair in probing.compare(two).items():
                    found.setdefault((reading, kind), []).append(pair)
    yield from share_rows(found)


def share_rows(found: Mapping[tuple[str, str], Sequence[Pair]]) -> Iterator[Row]:
    """A row for each reading of the similarity, kind of pair and threshold."""
    for ((reading, kind), several), threshold in itertools.product(found.items(), THRESHOLDS):
        shared = [pair for pair in several if pair.similarity >= threshold]
        wrong = sum(not pair.same for pair in shared)
        low, high = clopper_pearson(len(shared), len(several))
        yield {
            "similarity_of": reading,
            "second_prompt": kind,
            "threshold": threshold,
            "similarity_mean": round(float(np.mean([p.similarity for p in several])), 4),
            "shared_percent": round(100 * len(shared) / len(several), 1),
            "shared_low": round(100 * low, 1),
            "shared_high": round(100 * high, 1),
            "wrong_of_shared_percent": round(100 * wrong / len(shared), 1) if shared else "",
            "saved_tokens": round(sum(pair.saved for pair in shared) / len(several), 2),
            "spent_tokens": round(sum(pair.spent for pair in several) / len(several), 2),
            "prompt_tokens": round(float(np.mean([pair.length for pair in several])), 1),
            "n": len(several),
            "n_of": "pairs of prompts",
        }


# The pipeline


class Pipeline:
    """The stages of the paper's pipeline, on one model."""

    def __init__(self, size: str, n: int, decoded: int) -> None:
        model = random_llama(size, torch.float32)
        self.runner = ModelRunner(model, TorchCascade())
        pack_linears(model)
        self.layers = self.runner.layer_count
        vocabulary = model.config.vocab_size
        self.prompt = prefix(n, vocabulary)
        self.suffixes = [
            [(7 * branch + 3 * at + 5) % vocabulary for at in range(SUFFIX)]
            for branch in range(BRANCHES)
        ]
        self.question = prefix(QUESTION, vocabulary)
        self.slots = BRANCHES * (n + SUFFIX + decoded + QUESTION)
        lru = resolve("policy", "lru")
        self.engine = Engine(self.runner, NoText(), policy=lru, share="off")
        self.leaves: list[Node] = []

    def generate(self, shared: bool, decoded: int) -> None:
        """Prefix, suffixes and decoding: one prefix for all branches, or one for each."""
        engine = self.engine
        trees = [ThoughtTree(self.prompt) for _ in range(1 if shared else BRANCHES)]
        growth = Growth(0, Sampling(temperature=0), fixed_length(SUFFIX + decoded))
        for tree in trees:
            engine.open(tree, self.slots, pool=self.slots)
        self._run([engine.begin_extend(tree.root) for tree in trees])
        per_tree = BRANCHES // len(trees)
        blocks = [
            GivenBlock(tree.root, suffix, growth)
            for tree, suffix in zip(
                (tree for tree in trees for _ in range(per_tree)), self.suffixes, strict=True
            )
        ]
        begun = [
            engine.begin_given([block for block in blocks if block.leaf.tree is tree])
            for tree in trees
        ]
        self._run(begun)
        self.leaves = [node for each in begun for node in each.result()]

    def verify(self, rule: LayerExit | None = None) -> None:
        """One question for each branch, on its KV."""
        engine, leaves = self.engine, self.leaves
        asked = []
        for tree in dict.fromkeys(leaf.tree for leaf in leaves):
            mine = [leaf for leaf in leaves if leaf.tree is tree]
            several = [self.question] * len(mine)
            ways = () if rule is None else ways_of(rule, len(mine), [VERDICTS] * len(mine))
            asked.append(engine.begin_ask(mine, several, ways))
        self._run(asked)

    def end(self) -> None:
        """Free the KV of all branches."""
        for tree in list(self.engine.state.trees):
            self.engine.close(tree)

    def _run(self, operations: Sequence[Operation]) -> None:
        while not all(each.done for each in operations):
            self.engine.step()
        for each in operations:
            each.check()


def pipeline(args: argparse.Namespace) -> Iterator[Row]:
    """The time of each stage, and of their sums against the two baselines."""
    runs = Pipeline(args.size, args.prefix, args.decoded)
    rule = FixedExit(1, measure="margin", leaves_after=2 * runs.layers // 3)
    laps: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        began = time.thread_time()
        call()
        laps.setdefault(name, []).append(time.thread_time() - began)

    def once(shared: bool) -> None:
        who = "shared" if shared else "unshared"
        timed(f"generate, {who}", partial(runs.generate, shared, args.decoded))
        timed(f"verify, {who}", runs.verify)
        if shared:
            timed("verify, layer exit", partial(runs.verify, rule))
            runs.end()
            timed("generate, stopped", partial(runs.generate, shared, LEAST_DECODED))
        runs.end()

    contestants = {"unshared": partial(once, False), "shared": partial(once, True)}
    for _ in interleaved(contestants, 1, args.rounds, cpu=time.thread_time):
        pass
    seconds = {name: np.array(times[1:]) for name, times in laps.items()}  # the first warms up
    base = seconds["generate, unshared"] + seconds["verify, unshared"]
    exact = seconds["generate, shared"] + seconds["verify, shared"]
    arms = {
        "no sharing, full verification": base,
        "token-exact sharing, full verification": exact,
        "+ layer exit": seconds["generate, shared"] + seconds["verify, layer exit"],
        "+ verification skipped": seconds["generate, shared"],
        f"+ decoding stopped after {LEAST_DECODED} of {args.decoded}": seconds["generate, stopped"],
    }
    for name, times in {**seconds, **arms}.items():
        over, low, high = interval(base / times)
        more, more_low, more_high = interval(exact / times)
        yield {
            "model": args.size,
            "prefix": args.prefix,
            "decoded": args.decoded,
            "what": name,
            "kind": "stage" if name in seconds else "pipeline",
            "median_ms": round(1e3 * float(np.median(times)), 1),
            "over_unshared_ratio": round(over, 3),
            "over_unshared_low": round(low, 3),
            "over_unshared_high": round(high, 3),
            "over_exact_ratio": round(more, 3),
            "over_exact_low": round(more_low, 3),
            "over_exact_high": round(more_high, 3),
            "n": args.rounds,
            "n_of": "rounds",
        }


def searches(args: argparse.Namespace) -> Iterator[Row]:
    """The time of searches of the built-in model, with each part on."""
    parts: dict[str, dict[str, Any]] = {
        "forks share": {"share": "off", "verifier": "self"},
        "exact sharing": {"verifier": "self"},
        "+ skip (paper's percentiles)": {"verifier": PAPER_GATE},
        "+ layer exit (paper's median)": {"verifier": CGEE(levels="exit", exit_rule=PAPER_EXIT)},
        "+ both": {"verifier": replace(PAPER_GATE, levels="both", exit_rule=PAPER_EXIT)},
    }
    for search in args.searches:
        solvers = {
            name: Solver(**settings_of(args), **SEARCHES[search], **part)
            for name, part in parts.items()
        }
        some = next(iter(solvers.values()))
        problems = problems_of(args, some.task, args.n)
        spent: dict[str, list[list[float]]] = {name: [] for name in parts}
        right: dict[str, int] = dict.fromkeys(parts, 0)

        def solve(name: str) -> list[tuple[float, bool]]:
            taken = []
            for problem in problems:  # noqa: B023
                began = time.thread_time()
                solution = solvers[name].solve(problem)  # noqa: B023
                taken.append((time.thread_time() - began, bool(solution.correct)))
            return taken

        contestants = {name: partial(solve, name) for name in parts}
        for lap in interleaved(contestants, 1, args.rounds, cpu=time.thread_time):
            taken: Any = lap.result
            spent[lap.name].append([seconds for seconds, _ in taken])
            right[lap.name] = sum(correct for _, correct in taken)
        for each in solvers.values():
            each.close()
        totals = {name: np.array(several).sum(axis=1) for name, several in spent.items()}
        for name, times in totals.items():
            ratio, low, high = interval(totals["exact sharing"] / times)
            yield {
                "search": search,
                "what": name,
                "problem_ms": round(1e3 * float(np.median(times)) / len(problems), 1),
                "over_exact_ratio": round(ratio, 3),
                "over_exact_low": round(low, 3),
                "over_exact_high": round(high, 3),
                "solved": right[name],
                "problems": len(problems),
                "n": args.rounds,
                "n_of": "rounds",
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("gates", "layers", "share", "pipeline", "searches"))
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=350, help="problems, or pairs of prompts")
    parser.add_argument("--calibration", type=int, default=120, help="problems for thresholds")
    parser.add_argument("--size", choices=sorted(SIZES), default="100m", help="pipeline: model")
    parser.add_argument("--prefix", type=int, default=1024, help="pipeline: tokens")
    parser.add_argument("--decoded", type=int, default=8, help="pipeline: tokens of a branch")
    parser.add_argument("--rounds", type=int, default=7, help="pipeline, searches")
    parser.add_argument("--searches", nargs="+", choices=tuple(SEARCHES), default=tuple(SEARCHES))
    add_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(args)
    rows: list[Row] = []
    what = {
        "gates": gates,
        "layers": layers,
        "share": share,
        "pipeline": pipeline,
        "searches": searches,
    }[args.what]
    for row in what(args):
        if row in rows:  # two quantiles of one value
            continue
        rows.append(row)
        table.show(row)
    if args.what == "gates":
        for column in ("disagree_percent", "bound_percent"):
            print(*best_coverage(rows, column), sep="\n")


if __name__ == "__main__":
    main()
