"""What retention policies cost where nothing is lost, and what they lose where it is.

    # recorded once, replayed for every policy
    python scripts/eval_policies.py lossless --n 100 --json lossless.json
    python scripts/eval_policies.py lossy --task chains --n 500 --json lossy.json
    python scripts/eval_policies.py largest --n 20 --json largest.json  # how far a cap reaches
    python scripts/eval_policies.py share --n 20  # of wall time, for deciding and evicting
    # tokens and answers equal at every budget
    python scripts/eval_policies.py same --n 500 --json same.json

Budgets are parts of the measured full-retention peak of the same problem. `lossless` reports, over
problems: recomputed tokens per generated token (of sums), the ratio to the clairvoyant policy, peak
over budget (must be at most 1). `lossy` runs one greedy chain per problem (chains: `--steps`, as 6
16) and reports the share of right answers, paired with full retention and, with `--baseline`, with
that policy's arm of the same budget and rehydration. Intervals are 95 %: bootstrap over problems
for ratios, Clopper-Pearson for shares, bootstrap for paired differences.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eval_sapling import share
from model_and_problems import add_model_and_problems, problems_of, task_of, verifier_of_chains
from wipe_out import wipe_out

from arbor import Solver
from arbor.components import build, split_spec
from arbor.errors import BudgetInfeasible
from arbor.events import Boundary, Event, Forwarded, Verified
from arbor.measure.replay import RecordedSearch, replay, replay_smallest
from arbor.measure.statistics import bootstrap
from arbor.metrics import Unshared
from arbor.papers.ams.ams import AMS
from arbor.papers.arborkv.msve import MSVE
from arbor.papers.arborkv.ratio import Ratio
from arbor.papers.lazyeviction.lazy_eviction import LazyEviction
from arbor.papers.related.thinkv import ThinKV
from arbor.registry import names, resolve
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.retention.scorers import HeavyHitters, RandomTokens, Recency
from arbor.tasks.base import Problem
from arbor.tasks.chains import Chains, chain_to

SEARCHES: dict[str, dict[str, Any]] = {
    "tot-bfs": {"controller": {"name": "tot", "stop_value": None}},
    "tot-dfs": {"controller": {"name": "tot", "strategy": "dfs", "width": 5, "max_visited": 40}},
    "beam": {"controller": {"name": "beam", "beam_size": 5, "width": 4, "stop_value": None}},
    "beam-wide": {"controller": {"name": "beam", "beam_size": 16, "width": 4, "stop_value": None}},
    "dpts": {"controller": {"name": "dpts", "max_visited": 60}},
    "mcts": {"controller": {"name": "mcts"}},
}
USUAL = tuple(name for name in SEARCHES if name != "beam-wide")
GREEDY: dict[str, Any] = {"controller": "chain", "sampling": {"temperature": 0.0}}
LONGEST = {"chains": 36, "game24": 16}  # tokens of the longest line that the model writes
LOSSLESS = (
    *("lru", "uniform", "arborkv", "arborkv-published", "kkt"),
    *("streaming", "reentry", "belady"),  # those that rank by attention see none in a replay
)
LOSSY = ("random", "streaming", "h2o", "tova", "uniform", "lru", "reentry", "arborkv", "kkt")
PROTECT = Protect(sinks=4, recent=8, tail=0, floor=0)  # the same for all that are compared


def fair(name: str, **changes: Any) -> Policy:
    """A policy with the protection of all, and a token at a time, not with slots to spare."""
    changes = {"protect": PROTECT, "trigger": Trigger(), **changes}
    return dataclasses.replace(resolve("policy", name), **changes)


WINDOWS = (1, 4, 8, 13, 19, 25, 40)  # 80 % of the intervals measured on chains are at most 13
HEADED = ("h2o", "snapkv", "keydiff", "rkv", "rpc", "tova", "lazyeviction")
VARIANTS: dict[str, tuple[Policy, MSVE | None]] = {  # policies with one of their parts changed
    # with its own protection: tails, and a floor
    "arborkv-published": (resolve("policy", "arborkv"), None),
    "arborkv-any-path": (fair("arborkv", spares_paths=False), MSVE()),
    "arborkv-any-path-no-eta": (
        fair("arborkv", allocator=Ratio(eta=1.0), spares_paths=False),
        MSVE(),
    ),
    "arborkv-no-value": (fair("arborkv"), MSVE((0.0, 1.0, 1.0), -1.0)),
    "arborkv-no-confidence": (fair("arborkv"), MSVE((2.0, 0.0, 1.0), -1.5)),
    "arborkv-no-attention": (fair("arborkv"), MSVE((2.0, 1.0, 0.0), -1.5)),
    "arborkv-no-eta": (fair("arborkv", allocator=Ratio(eta=1.0)), MSVE()),
    "arborkv-no-distance": (fair("arborkv", allocator=Ratio(lambda_distance=0.0)), MSVE()),
    "arborkv-no-tree": (fair("arborkv", allocator=Ratio(eta=1.0, lambda_distance=0.0)), MSVE()),
    "arborkv-per-query": (fair("arborkv", scorer=HeavyHitters(normalise=True)), MSVE()),
    "arborkv-tail-only": (fair("arborkv", scorer=Recency()), MSVE()),
    "arborkv-by-lot": (fair("arborkv", scorer=RandomTokens()), MSVE()),
    "arborkv-as-guessed": (fair("arborkv"), MSVE()),
}
VARIANTS |= {
    f"{name}-each": (policy, None)
    for name, policy in {
        "ams": fair("ams"),
        "ams-no-credit": fair("ams", allocator=AMS(blend=1.0)),
        "thinkv": fair("thinkv"),
        "thinkv-scored": fair("thinkv", allocator=ThinKV(choose="score"), scorer=HeavyHitters()),
        "lazyeviction": fair("lazyeviction"),
        "lazyeviction-paper": fair("lazyeviction", scorer=LazyEviction(h2="paper")),
        "lazyeviction-off": fair("lazyeviction", scorer=LazyEviction(h2="off")),
        **{
            f"{allocator}-{scorer}": fair(allocator, scorer=resolve("policy", scorer).scorer)
            for allocator, scorer in itertools.product(("ams", "strata"), ("keydiff", "rkv"))
        },
    }.items()
}
for _window in WINDOWS:
    VARIANTS[f"lazyeviction-w{_window}"] = (
        fair("lazyeviction", trigger=Trigger(spare=_window)),
        None,
    )
for _name in HEADED:
    VARIANTS[f"{_name}-heads"] = (fair(_name, granularity="head"), None)
    # one set for all heads, from all layers, as `granularity=head` observes them
    VARIANTS[f"{_name}-layers"] = (fair(_name, observed="all"), None)
for _name, _heads in itertools.product(("h2o", "snapkv", "tova"), ("adaptive", "pyramid")):
    VARIANTS[f"{_name}-{_heads}"] = (fair(_name, granularity="head", heads=_heads), None)
RESAMPLES = 2000
# slots added to the budget of a policy that frees some ahead, by what the budget is to bound
AHEAD: dict[str, Callable[[int], int]] = {
    "peak": lambda spare: 0,
    "mean": lambda spare: spare // 2,
    "least": lambda spare: spare,
}
SIZES = {  # of the searches of `share`, by about how many blocks they have: beam, width, how many times fewer problems
    174: (9, 10, 1.0),
    556: (94, 12, 2.5),
    1826: (400, 25, 10.0),
}


def of_length(args: argparse.Namespace) -> Any:
    """The task, of the length that was asked for."""
    if args.task == "chains" and args.steps:
        return {"name": "chains", "fewest": args.steps[0], "most": args.steps[1]}
    return args.task


def lossless(args: argparse.Namespace) -> dict[str, Any]:
    """Costs of every policy, by replay of recorded searches."""
    results: dict[str, Any] = {"rows": []}
    for name in args.searches or USUAL:
        events: list[Event] = []
        records: list[RecordedSearch] = []
        peaks, unshared = [], []
        with Solver(
            args.model, task=args.task, listeners=(events.append,), **SEARCHES[name]
        ) as solver:
            for problem in problems_of(args, solver.task, args.n):
                events.clear()
                metrics = solver.solve(problem).metrics
                records.append(RecordedSearch.of(list(events)))
                peaks.append(metrics.peak_tokens)
                unshared.append(metrics.peak_unshared_tokens)
            tokenizer = solver.tokenizer
        generated = np.array([sum(len(b.ids) for b in r.blocks.values()) for r in records])
        print(f"{name}: {len(records)} recorded, peak {np.mean(peaks):.0f} tokens", flush=True)
        results[name] = {
            "n": len(records),
            "peak_tokens": float(np.mean(peaks)),
            "unshared_tokens": float(np.mean(unshared)),
        }
        cost: dict[tuple[float, str, str], np.ndarray] = {}
        for ratio, rehydrate, policy in itertools.product(
            args.budgets, ("selective", "span"), args.policies or LOSSLESS
        ):
            began = time.perf_counter()
            runs = [
                replayed(r, tokenizer, policy, max(math.floor(ratio * p), 1), rehydrate)
                for r, p in zip(records, peaks, strict=True)
            ]
            key = (ratio, rehydrate, policy)
            cost[key] = np.array([run["recomputed"] for run in runs], float)
            ran = [run for run in runs if run["fits"]]
            results["rows"].append(
                {
                    "search": name,
                    "budget": ratio,
                    "rehydrate": rehydrate,
                    "policy": policy,
                    "problems": len(ran),
                    "raised": len(runs) - len(ran),
                    "over_budget": sum(run["over"] for run in ran),
                    **ratio_of(cost[key], generated),
                    "of_shared": ratio_of(np.array([r["peak"] for r in runs]), np.array(peaks)),
                    "of_unshared": ratio_of(
                        np.array([r["peak"] for r in runs]), np.array(unshared)
                    ),
                    "policy_us_per_event": 1e6
                    * sum(r["policy_s"] for r in runs)
                    / max(1, sum(r["events"] for r in runs)),
                    "replay_s": time.perf_counter() - began,
                }
            )
            print(json.dumps(results["rows"][-1]), flush=True)
        for row in results["rows"]:
            key = (row["budget"], row["rehydrate"], "belady")
            if row["search"] == name and key in cost:
                mine = cost[(row["budget"], row["rehydrate"], row["policy"])]
                row["to_belady"] = ratio_of(mine, cost[key])
                other = cost.get((row["budget"], "span", row["policy"]))
                if other is not None:
                    row["to_span"] = ratio_of(mine, other)
    return results


def replayed(
    record: RecordedSearch, tokenizer: Any, policy: str, slots: int, rehydrate: Any
) -> dict[str, Any]:
    """One replay; at the smallest budget that works where this one does not."""
    ready, msve = variant(policy)
    held, metrics = replay_smallest(
        record, tokenizer, slots=slots, policy=ready, rehydrate=rehydrate, scores=msve
    )
    return {
        "recomputed": metrics.tokens_recomputed,
        "over": metrics.peak_tokens > held,
        "peak": metrics.peak_tokens,
        "policy_s": metrics.policy_s,
        "events": metrics.pressure_events,
        "fits": held == slots,
    }


def largest(args: argparse.Namespace) -> dict[str, Any]:
    """Leaves a depth-first search grows, one a round, before a cap is reached: unshared, shared,
    and within the cap by rehydration."""
    rows: list[dict[str, Any]] = []
    search = {"name": "tot", "strategy": "dfs", "width": 8, "max_per_state": 8, "max_visited": 200}
    events: list[Event] = []
    records: list[tuple[list[int], list[int], RecordedSearch]] = []
    with Solver(
        args.model, task=args.task, controller=search, listeners=(events.append,)
    ) as solver:
        split = "hard" if args.task == "game24" else "test"
        for problem in problems_of(args, solver.task, args.n, split):
            events.clear()
            solver.solve(problem)
            shared, peak, unshared = [], 0, Unshared()
            for event in events:
                unshared(event)
                peak = max(peak, event.kv.device) if isinstance(event, Forwarded) else peak
                if isinstance(event, Verified):
                    shared.append(peak)
            records.append((unshared.rounds, shared, RecordedSearch.of(list(events))))
        tokenizer = solver.tokenizer
    for cap in (128, 256, 512, 1024):
        ours, cost = [], []
        for _, shared, record in records:
            try:
                metrics = replay(record, tokenizer, policy="reentry", slots=cap)
            except BudgetInfeasible:
                ours.append(0)
                continue
            ours.append(len(shared))
            cost.append(metrics.tokens_recomputed / max(1, metrics.tokens_generated))
        rows.append(
            {
                "cap_tokens": cap,
                "n": len(records),
                "unshared": mean_of([within(held, cap) for held, _, _ in records]),
                "shared": mean_of([within(held, cap) for _, held, _ in records]),
                "arbor": mean_of(ours),
                "recomputed_per_generated": float(np.mean(cost)) if cost else None,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {"search": search, "rows": rows}


def shares(args: argparse.Namespace) -> dict[str, Any]:
    """What part of a search's wall time deciding and evicting takes, in trees of three sizes,
    live."""
    rows: list[dict[str, Any]] = []
    sizes = [SIZES[blocks] for blocks in args.blocks]
    for policy, (beam, width, fewer) in itertools.product(args.policies or LOSSY, sizes):
        search = {"name": "tot", "beam": beam, "width": width, "max_per_state": width}
        ready, msve = variant(policy)
        with Solver(
            args.model,
            task=args.task,
            controller={**search, "stop_value": None},
            step_tokens=LONGEST.get(args.task),
            policy=ready,
            msve=msve,
        ) as solver:
            runs = []
            for problem in problems_of(args, solver.task, max(2, int(args.n / fewer))):
                peak = solver.solve(problem).metrics.peak_tokens
                slots = max(peak // 4, solver.plan(problem).enough_tokens)
                runs.append(solver.solve(problem, budget=f"{slots}tok").metrics)
        spent = np.array([(1e3 * m.policy_s, 1e3 * m.wall_s) for m in runs])  # ms
        rows.append(
            {
                "policy": policy,
                "n": len(runs),
                "blocks": float(np.mean([m.nodes for m in runs])),
                "share": ratio_of(*spent.T),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows}


def mean_of(values: Sequence[float]) -> dict[str, float]:
    """The mean over problems, with its 95 % bootstrap interval."""
    low, high = bootstrap(values)
    return {"mean": float(np.mean(values)), "low": low, "high": high}


def within(held: Sequence[int], cap: int) -> int:
    """Rounds before more than the cap is held."""
    return next((place for place, tokens in enumerate(held) if tokens > cap), len(held))


def ratio_of(top: np.ndarray, bottom: np.ndarray) -> dict[str, float]:
    """sum(top) / sum(bottom) over problems, with its 95 % bootstrap interval."""
    drawn = np.random.default_rng(0).integers(0, len(top), (RESAMPLES, len(top)))
    sums = top[drawn].sum(axis=1) / np.maximum(1.0, bottom[drawn].sum(axis=1))
    low, high = np.percentile(sums, (2.5, 97.5))
    return {
        "ratio": float(top.sum() / max(1.0, bottom.sum())),
        "low": float(low),
        "high": float(high),
    }


def lossy(args: argparse.Namespace) -> dict[str, Any]:
    """Share of right answers by policy, budget and whether eviction can be undone."""
    rows: list[dict[str, Any]] = []
    for name in args.searches or ("chain",):
        greedy = GREEDY | {"verifier": verifier_of_chains(args.task)}
        search = greedy if name == "chain" else SEARCHES[name]
        longest = LONGEST.get(args.task)  # so that little has to stay free
        settings = {**search, "task": of_length(args), "step_tokens": longest}
        with Solver(args.model, **settings) as solver:
            chosen = problems_of(args, solver.task, args.n, args.split)
            full = solved(solver, [(problem, {}) for problem in chosen], args.concurrency)
        right = np.array([bool(solution.correct) for solution in full])
        peaks = [solution.metrics.peak_tokens for solution in full]
        rows.append(
            {
                "search": name,
                "policy": "full",
                "budget": 1.0,
                "peak_tokens": float(np.mean(peaks)),
                **share(right.tolist()),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        first = [args.baseline] if args.baseline else []  # the others are compared with it
        policies = first + [p for p in args.policies or LOSSY if p not in first]
        arms = [
            Arm(policy, rehydrate, ratio, name, settings, chosen, peaks, right)
            for policy, rehydrate, ratio in itertools.product(
                policies, args.rehydrate, args.budgets
            )
        ]
        baseline: dict[tuple[str, float], np.ndarray] = {}
        done = {}
        for place, row in each_arm(arms, args):
            key = row["rehydrate"], row["budget"]
            if row["policy"] == args.baseline:
                baseline[key] = np.array(row["right"])
            elif key in baseline:
                row["against_baseline"] = paired(np.array(row["right"]), baseline[key])
            print(json.dumps({k: v for k, v in row.items() if k != "right"}), flush=True)
            done[place] = row
        rows += [done[place] for place in range(len(arms))]
    return {"task": args.task, "protect": str(PROTECT), "rows": rows}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm of `lossy`.

    Attributes:
        policy, rehydrate, budget: of the arm; the budget as a part of each problem's peak.
        search, settings: name of the search, and what its solver is made with.
        problems: that are searched.
        peaks, right: of each at full retention.
    """

    policy: str
    rehydrate: Any
    budget: float
    search: str
    settings: dict[str, Any]
    problems: Sequence[Problem]
    peaks: Sequence[int]
    right: np.ndarray


def each_arm(arms: Sequence[Arm], args: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    """Place and row of each arm as it ends; the baseline's first where there is one."""
    if args.jobs == 1:
        for place, arm in enumerate(arms):
            yield place, searched(arm, args)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        places = {pool.submit(searched, arm, args): place for place, arm in enumerate(arms)}
        ended = places if args.baseline else as_completed(places)
        for future in ended:
            yield places[future], future.result()


def searched(arm: Arm, args: argparse.Namespace) -> dict[str, Any]:
    """Search the problems of an arm: its row, and which answers were right."""
    torch.set_num_threads(1)  # also in a process of its own
    ready, msve = variant(arm.policy)
    ahead = AHEAD[args.sized](ready.trigger.spare)
    slots = [math.floor(arm.budget * peak) + ahead for peak in arm.peaks]
    with Solver(
        args.model,
        policy=ready,
        msve=msve,
        mode="lossy",
        rehydrate=arm.rehydrate,
        **arm.settings,
    ) as solver:
        jobs = [
            (problem, {"budget": f"{max(1, most)}tok"})
            for problem, most in zip(arm.problems, slots, strict=True)
        ]
        if args.wiped_out:
            runs, gaps = one_by_one(solver, jobs)
        else:
            runs, gaps = solved(solver, jobs, args.concurrency), []
    got = np.array([bool(run is not None and run.correct) for run in runs])
    return {
        "search": arm.search,
        "policy": arm.policy,
        "rehydrate": arm.rehydrate,
        "budget": arm.budget,
        "sized": args.sized,
        **share(got.tolist()),
        **by_recall(solver.task, arm.problems, got),
        "against_full": paired(got, arm.right),
        **costs(runs),
        "wiped_out": {kind: mean_of([gap[kind] for gap in gaps]) for kind in (gaps or [{}])[0]},
        "right": got.tolist(),
    }


def by_recall(task: Any, problems: Sequence[Problem], right: np.ndarray) -> dict[str, Any]:
    """Shares of right answers by how many lines back the farthest sum of a word problem reaches;
    nothing for other tasks."""
    if not isinstance(task, Chains):
        return {}
    farthest = np.array([recall_of(task, problem) for problem in problems])
    return {
        "by_recall": {
            int(back): share(right[farthest == back].tolist()) for back in np.unique(farthest)
        }
    }


def recall_of(task: Chains, problem: Problem) -> int:
    """Lines from the farthest line that a sum of the solution reads to the sum; 0 without sums."""
    order = chain_to(task.facts(problem), problem.data["asked"])
    place = {fact.who: index for index, fact in enumerate(order)}
    sums = [fact for fact in order if fact.kind == "sum"]
    return max((place[fact.who] - place[name] for fact in sums for name in fact.needs), default=0)


def policy_name(text: str) -> str:
    """The name of a policy or a variant, also with settings (``triattention,queries=FILE``)."""
    if split_spec(text)[0] not in (*VARIANTS, *names("policy")):
        known = ", ".join((*names("policy"), *VARIANTS))
        raise argparse.ArgumentTypeError(f"{text} is not one of {known}")
    return text


def variant(name: str) -> tuple[Policy, MSVE | None]:
    """A policy by its name or that of a variant, and its block values; None: those of the model.

    Settings may follow the name.
    """
    base, settings = split_spec(name)
    policy, msve = VARIANTS.get(base) or (build("policy", base, protect=PROTECT), None)
    return build("policy", policy, **settings), msve


def paired(got: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """How many more of the same problems were right, as a share, with its 95 % interval."""
    difference = got.astype(float) - other
    low, high = bootstrap(difference)
    return {"difference": float(difference.mean()), "low": low, "high": high}


def costs(runs: Sequence[Any]) -> dict[str, Any]:
    """What the runs of one arm cost; None stands for a budget that was too small, whose answer
    counts as wrong."""
    held = [run.metrics for run in runs if run is not None]
    generated = sum(m.tokens_generated for m in held)
    return {
        "over_budget": sum(m.peak_tokens > m.budget_tokens for m in held),
        "infeasible": len(runs) - len(held),
        "recomputed_per_generated": sum(m.tokens_recomputed for m in held) / max(1, generated),
        "generated": generated,
        "mean_tokens": float(np.mean([m.mean_tokens for m in held])) if held else 0.0,
    }


def solved(solver: Solver, jobs: Sequence[Any], at_once: int) -> list[Any]:
    """The solutions of problems that are searched together, each within its own budget; None where
    not even the protected tokens fit."""
    found: list[Any] = [None] * len(jobs)
    for place, solution in solver.results(jobs, concurrency=at_once):
        if isinstance(solution, BudgetInfeasible):
            continue
        if isinstance(solution, Exception):
            raise solution
        found[place] = solution
    return found


def one_by_one(solver: Solver, jobs: Sequence[Any]) -> tuple[list[Any], list[dict[str, float]]]:
    """The same one after another, and what was wiped out of each path."""
    runs, gaps = [], []
    for job in jobs:
        runs += solved(solver, [job], 1)
        if runs[-1] is not None:
            gaps.append(wipe_out(solver))
    return runs, gaps


def bounded(solver: Solver, problem: Any, slots: int) -> Any:
    """The solution within so many slots; None where not even the protected tokens fit."""
    try:
        return solver.solve(problem, budget=f"{max(1, slots)}tok")
    except BudgetInfeasible:
        return None


def same(args: argparse.Namespace) -> dict[str, Any]:
    """Whether tokens and answers are those of full retention, live, at every budget."""
    rows: list[dict[str, Any]] = []
    for name in args.searches or USUAL:
        settings = {
            **SEARCHES[name],
            "deterministic": args.deterministic,
            "task": of_length(args),
        }
        if args.steps:  # no longer than need be, or the smallest budget holds most of the tree
            settings |= {"step_tokens": LONGEST["chains"], "max_depth": args.steps[1] + 2}
        if args.temperature is not None:
            settings["sampling"] = {"temperature": args.temperature}
        blocks = Blocks()
        with Solver(
            args.model,
            policy=args.policies[0] if args.policies else "reentry",
            listeners=(blocks.hear,),
            **settings,
        ) as solver:
            chosen = problems_of(args, solver.task, args.n)
            if args.only:
                chosen = [problem for problem in chosen if problem.text in args.only]
            full = [(problem, solver.solve(problem), blocks.take()) for problem in chosen]
            for ratio in args.budgets:
                row = {"search": name, "deterministic": args.deterministic, "budget": ratio}
                rows.append({**row, **compared(solver, blocks, full, ratio)})
                print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows}


def compared(
    solver: Solver, blocks: Blocks, full: Sequence[tuple[Any, Any, Any]], ratio: float
) -> dict[str, Any]:
    """Searches within a part of their own peak, or the smallest budget that works, against those of
    full retention.

    Args:
        blocks: hears the solver.
        full: problems, their solutions at full retention, and the tokens of their blocks.
        ratio: the part.
    """
    answers = over = smallest = recomputed = generated = held = peaks = 0
    differ = []
    for problem, whole, tree in full:
        slots = max(math.floor(ratio * whole.metrics.peak_tokens), 1)
        run = bounded(solver, problem, slots)
        if run is None:
            smallest += 1
            needed = solver.plan(problem).enough_tokens
            run = solver.solve(problem, budget=f"{needed}tok")
        if blocks.take() != tree:
            differ.append(problem.text)
        answers += run.answer != whole.answer
        over += run.metrics.peak_tokens > run.metrics.budget_tokens
        recomputed += run.metrics.tokens_recomputed
        generated += run.metrics.tokens_generated
        held += run.metrics.budget_tokens
        peaks += whole.metrics.peak_tokens
    return {
        "n": len(full),
        "at_smallest": smallest,
        "budget_of_peak": held / peaks,
        "trees_that_differ": len(differ),
        "differ": differ,
        "answers_that_differ": answers,
        "over_budget": over,
        "recomputed": recomputed,
        "generated": generated,
    }


class Blocks:
    """The tokens of every block of a run, by its id."""

    def __init__(self) -> None:
        self._ids: dict[int, tuple[int, ...]] = {}

    def hear(self, event: Event) -> None:
        """Takes in what the engine reports."""
        if isinstance(event, Boundary):
            self._ids[event.node] = tuple(event.ids)

    def take(self) -> dict[int, tuple[int, ...]]:
        """The run that is over; the next one begins with nothing."""
        ids, self._ids = self._ids, {}
        return ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("lossless", "lossy", "same", "largest", "share"))
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--split", default="test", help="lossy: of the task's problems")
    parser.add_argument("--budgets", type=float, nargs="+", default=(0.5, 0.25, 0.125))
    parser.add_argument("--searches", nargs="+", choices=("chain", *SEARCHES))
    parser.add_argument("--policies", nargs="+", type=policy_name, metavar="NAME[,KEY=VALUE]")
    parser.add_argument(
        "--baseline",
        type=policy_name,
        metavar="NAME[,KEY=VALUE]",
        help="lossy: paired with this one too",
    )
    parser.add_argument(
        "--concurrency", type=int, default=16, help="lossy: problems searched together"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="lossy: arms searched at a time, each by a process"
    )
    parser.add_argument(
        "--wiped-out",
        action="store_true",
        help="lossy, chain: one problem at a time, and the lines and stretches nothing is left of",
    )
    parser.add_argument("--rehydrate", nargs="+", default=("off", "selective"))
    parser.add_argument(
        "--steps", type=int, nargs=2, help="lossy and same, chains: fewest and most steps"
    )
    parser.add_argument(
        "--sized",
        choices=list(AHEAD),
        default="peak",
        help="lossy: the size that a budget bounds where a policy frees slots ahead",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="same: with deterministic=True"
    )
    parser.add_argument(
        "--temperature", type=float, help="same: 2 makes wide trees of chains, else nearly paths"
    )
    parser.add_argument("--only", nargs="+", help="same: of the --n problems those of these texts")
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        choices=SIZES,
        default=tuple(SIZES),
        help="share: which trees",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.task = task_of(args)
    torch.set_num_threads(1)
    result = {
        "lossless": lossless,
        "lossy": lossy,
        "same": same,
        "largest": largest,
        "share": shares,
    }[args.what](args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
