"""What a model's judgement of its own chains is worth: right against wrong final answers.

    python scripts/eval_judges.py --model MODEL --dataset gsm8k.jsonl --task gsm8k --n 200
    python scripts/eval_judges.py … --n 40 --samples 8 --temperature 0.7

Chains of thought are decoded, or read from ``--chains``, where they are kept. Then every chain is
judged by several questions after its KV, in its own text and in a turn of its own, and by its log
probabilities. Reported for each judge: the area under the curve (AUC) of right against wrong
answers, with an interval from whole problems resampled, and the tokens of a question. With several
chains of a problem also the share of the pairs of a right and a wrong chain of one problem that the
judge orders rightly, which is what a choice among them rests on, and how often the chain that it
prefers is right.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of, task_of
from rounds import auc

from arbor import Sampling, Solver
from arbor.errors import UsageError
from arbor.events import Boundary, Event, Opened
from arbor.measure.statistics import bootstrap_groups
from arbor.run.planning import encode_prompt
from arbor.run.questions import Words, question_turn
from arbor.tasks.base import Problem, Question
from arbor.tree import ThoughtTree
from arbor.verifiers.self_eval import VerdictTokens, expected_worth, verdict_tokens

YES = {" yes": 1.0, " Yes": 1.0, " no": 0.0, " No": 0.0}
SURE = {
    **dict.fromkeys((" sure", " Sure"), 1.0),
    **dict.fromkeys((" likely", " Likely"), 0.5),
    **dict.fromkeys((" impossible", " Impossible"), 0.0),
}
LETTERS = {" A": 1.0, " B": 0.0}
ASKED: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "yes or no": ("Is the final answer correct? Answer yes or no.", YES),
    "sure, likely, impossible": (
        "Evaluate if the final answer above is correct (sure/likely/impossible). "
        "Answer with one word.",
        SURE,
    ),
    "A or B": ("Is the final answer (A) right or (B) wrong? Answer A or B.", LETTERS),
}
Judges = Mapping[str, Callable[[Mapping[str, Any]], float]]


def questions() -> dict[str, Question]:
    """What is asked, by the judge's name."""
    found = {}
    for name, (asked, values) in ASKED.items():
        text = f"\n\n{asked}\nAnswer:"
        found[f"text: {name}"] = Question(text, values)
        found[f"turn: {name}"] = Question(text, values, Question(asked, values))
    return found


def decoded(solver: Solver, problems: Sequence[Problem], at_once: int) -> Iterator[dict[str, Any]]:
    """Every finished chain of every problem, as it is kept."""
    blocks: dict[int, dict[int, Boundary]] = {}
    parents: dict[int, dict[int, int]] = {}

    def listen(place: int, event: Event) -> None:
        if isinstance(event, Opened) and event.parent is not None:
            parents.setdefault(place, {})[event.node] = event.parent
        elif isinstance(event, Boundary):
            blocks.setdefault(place, {})[event.node] = event

    jobs: list[tuple[Problem, dict[str, Any]]] = [(problem, {}) for problem in problems]
    for place, solution in solver.as_completed(jobs, concurrency=at_once, listen=listen):
        problem, above = problems[place], parents.pop(place)
        closed = blocks.pop(place)
        prompt = encode_prompt(solver.tokenizer, solver.task.prompt(problem), solver.task)
        for each in solution.candidates:
            path = [each.node]
            while above[path[0]] in closed:
                path.insert(0, above[path[0]])
            grade = solver.task.grade(problem, each.answer)
            yield {
                "problem": problem.id,
                "prompt": prompt,
                "ids": [token for node in path for token in closed[node].ids],
                "logprob": sum(closed[node].logprob for node in path),
                "answer": grade.extracted,
                "right": grade.correct,
            }


def judged(solver: Solver, chain: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The value and the tokens of each question about one chain, after its KV."""
    engine, tokenizer = solver.engine, solver.tokenizer
    turn = question_turn(tokenizer, solver.task, Problem("", solver.task.name, ""))
    tree = ThoughtTree([*chain["prompt"], *chain["ids"]])
    # in the assistant's text nothing follows the end of its turn
    ends = turn is not None and chain["ids"][-1:] == turn.encode("?")[:1]
    inside = ThoughtTree(tree.root.tokens[:-1] if ends else tree.root.tokens)
    found = {}
    places = [("text", inside.root), *([("turn", tree.root)] if turn is not None else [])]
    for place, root in places:
        words = Words(
            partial(tokenizer.encode, add_special_tokens=False), turn if place == "turn" else None
        )
        asked = {
            name: known
            for name, question in questions().items()
            if name.startswith(place) and (known := _told_apart(question, words)) is not None
        }
        if not asked:
            continue
        engine.open(root.tree, root.end + 256)
        engine.extend(root)
        tokens = [each.after(root) for each in asked.values()]
        logits = engine.ask([root] * len(asked), tokens)
        engine.finish(root.tree)
        for (name, each), row, sent in zip(asked.items(), logits, tokens, strict=True):
            known = row[list(each.worth)].float().cpu()
            value = expected_worth(known, list(each.worth.values()))
            found[name] = {"value": value, "tokens": len(sent)}
    return found


def _told_apart(question: Question, words: Words) -> VerdictTokens | None:
    """A question as it is asked; None where the tokenizer cannot tell its verdicts apart."""
    try:
        return verdict_tokens(question, words)
    except UsageError:
        return None


def of_chains() -> Judges:
    """The judges that ask nothing."""
    return {
        "log probability": lambda chain: chain["logprob"],
        "log probability, mean": lambda chain: chain["logprob"] / max(1, len(chain["ids"])),
        "fewest tokens": lambda chain: -len(chain["ids"]),
    }


def shares(chains: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of each chain, the share of its problem's chains that give its answer."""
    votes: dict[tuple[str, str | None], int] = {}
    of_problem: dict[str, int] = {}
    for chain in chains:
        key = (chain["problem"], chain["answer"])
        votes[key] = votes.get(key, 0) + 1
        of_problem[chain["problem"]] = of_problem.get(chain["problem"], 0) + 1
    return [votes[c["problem"], c["answer"]] / of_problem[c["problem"]] for c in chains]


def within(
    values: np.ndarray[Any, Any], right: np.ndarray[Any, Any], groups: np.ndarray[Any, Any]
) -> tuple[float, float]:
    """`auc` over the pairs of one problem, all pairs alike, and the share of problems with both
    kinds whose chain of the highest value is right."""
    pairs = ordered = 0.0
    best = []
    for group in np.unique(groups):
        here = groups == group
        mine, ok = values[here], right[here]
        if ok.all() or not ok.any():
            continue
        count = int(ok.sum()) * int((~ok).sum())
        pairs, ordered = pairs + count, ordered + count * auc(mine, ok)
        top = mine == mine.max()
        best.append(float(ok[top].mean()))
    return (ordered / pairs if pairs else math.nan), (float(np.mean(best)) if best else math.nan)


def report(chains: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each judge."""
    right = np.array([chain["right"] for chain in chains])
    names = sorted({chain["problem"] for chain in chains})
    groups = np.array([names.index(chain["problem"]) for chain in chains])
    several = len(names) < len(chains)
    columns: dict[str, tuple[list[float], float]] = {
        name: ([judge(chain) for chain in chains], 0.0) for name, judge in of_chains().items()
    }
    if several:
        columns["share of the votes"] = (shares(chains), 0.0)
    for name in chains[0]["judged"]:
        judged_values = [float(chain["judged"][name]["value"]) for chain in chains]
        tokens = float(np.mean([chain["judged"][name]["tokens"] for chain in chains]))
        columns[name] = (judged_values, tokens)
    rows = []
    for name, (listed, tokens) in columns.items():
        values = np.array(listed)

        def drawn(at: np.ndarray[Any, Any], values: np.ndarray[Any, Any] = values) -> float:
            return auc(values[at], right[at])

        low, high = bootstrap_groups(groups, drawn)
        pairs, best = within(values, right, groups)
        rows.append(
            {
                "judge": name,
                "auc_percent": _shown(100 * auc(values, right)),
                "auc_low_percent": _shown(100 * low),
                "auc_high_percent": _shown(100 * high),
                "same_problem_percent": _shown(100 * pairs),
                "best_right_percent": _shown(100 * best),
                "question_tokens": round(tokens, 1),
                "distinct": len(set(listed)),
                "right": int(right.sum()),
                "n": len(chains),
                "n_of": f"chains of {len(names)} problems" if several else "chains",
            }
        )
    return rows


def _shown(percent: float) -> float | str:
    return "" if math.isnan(percent) else round(percent, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=200, help="problems")
    parser.add_argument("--samples", type=int, default=1, help="chains of a problem")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=8, help="problems decoding at a time")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-questions", action="store_true", help="only judges that ask nothing")
    parser.add_argument("--chains", type=Path, help="JSON lines: chains, and what judged them")
    add_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        **settings_of(args),
        "controller": f"chain,samples={args.samples}",
        "aggregate": "majority",  # reads no value, so that nothing is judged while chains grow
        "verifier": "self",
        "sampling": Sampling(temperature=args.temperature),
        "dtype": args.dtype,
        "seed": args.seed,
        "record_bytes": 0,
    }
    with Solver(**settings) as solver:
        chains = list(_whole(solver, args))
    about = {"model": Path(args.model).name, "task": task_of(args), "temperature": args.temperature}
    table = ExperimentTable(args)
    for row in report(chains):
        table.show(about | row)


def _whole(solver: Solver, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every chain with its judgements; those in ``--chains`` are read, the others added to it."""
    kept: list[dict[str, Any]] = []
    if args.chains is not None and args.chains.exists():
        kept = [json.loads(line) for line in args.chains.read_text("utf-8").splitlines()]
    if not kept:
        problems = problems_of(args, solver.task, args.n)
        kept = list(decoded(solver, problems, args.concurrency))
        _keep(args.chains, kept)
    for number, chain in enumerate(kept, 1):
        if args.no_questions:
            chain.setdefault("judged", {})
        if "judged" not in chain:
            chain["judged"] = judged(solver, chain)
            if number % 25 == 0 or number == len(kept):
                _keep(args.chains, kept)
                print(f"{number:,} of {len(kept):,} chains judged", file=sys.stderr, flush=True)
        yield chain


def _keep(path: Path | None, chains: Sequence[Mapping[str, Any]]) -> None:
    if path is not None:
        path.write_text("".join(f"{json.dumps(chain)}\n" for chain in chains), "utf-8")


if __name__ == "__main__":
    main()
