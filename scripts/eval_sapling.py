"""Evaluates a model on held-out problems with plain Hugging Face generation: no search engine of
ours involved.

    python scripts/eval_sapling.py --model arbor/sapling  # the numbers of the model card (minutes)
    # few problems, one JSON line (a minute)
    python scripts/eval_sapling.py --model arbor/sapling --quick

What is measured, on Game of 24 (`--split`, hands never trained on), unless said otherwise:

    greedy      the most likely token each time; graded by the composed answer
    sampled     one sample at temperature 1, any of eight samples; legal_steps is the share of
                sampled lines that are legal
    tree        breadth-first Tree of Thoughts: every state proposes `--proposals` lines, the
                model's own verdict keeps the best `--beam`; `first` grades the best judged leaf,
                `any` all that were kept
    judge       area under the ROC curve of P(yes) against the exact label, on states after random
                legal steps (`random`) and on the states the tree search proposed (`proposed`)
    chains      greedy accuracy by number of steps;   recall: greedy accuracy

Intervals are 95 %: Clopper-Pearson for shares, bootstrap over problems for areas.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import auc
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from arbor.measure.statistics import bootstrap_groups, clopper_pearson
from arbor.tasks.base import Problem
from arbor.tasks.chains import Chains
from arbor.tasks.countdown import legal_steps, take
from arbor.tasks.game24 import Game24
from arbor.tasks.recall import Recall

SAPLING = Path(__file__).resolve().parents[1] / "arbor" / "sapling"


def share(results: Sequence[bool]) -> dict[str, Any]:
    """A share with its n and interval."""
    n, right = len(results), sum(results)
    interval = [round(end, 4) for end in clopper_pearson(right, n)]
    return {"share": round(right / max(n, 1), 4), "n": n, "interval": interval}


def area_of(groups: Sequence[Sequence[tuple[float, bool]]]) -> dict[str, Any]:
    """Area over all states, 0.5 with one class only, with a bootstrap over problems (`groups`)."""
    states = [pair for group in groups for pair in group]
    values = np.array([value for value, _ in states])
    labels = np.array([label for _, label in states], bool)

    def of(chosen: Any) -> float:
        return float(np.nan_to_num(auc(values[chosen], labels[chosen]), nan=0.5))

    problems = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return {
        "area": round(of(slice(None)), 4),
        "n_states": len(states),
        "n_problems": len(groups),
        "positive": round(float(labels.mean()), 3),
        "interval": [round(end, 4) for end in bootstrap_groups(problems, of)],
    }


@dataclass
class Reasoner:
    """A model that continues texts and answers questions, batched."""

    model: Any
    tokenizer: Any
    batch: int = 128

    @classmethod
    def load(cls, directory: str) -> Reasoner:
        """From files in Hugging Face's format."""
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return cls(model, AutoTokenizer.from_pretrained(directory))

    def _prompts(self, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Left-padded ids, attention mask and positions, each [B, T]."""
        rows = [self.tokenizer(text).input_ids for text in texts]
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)

    @torch.inference_mode()
    def _continue(
        self, texts: Sequence[str], lines: int, most: int, heat: float, noise: torch.Generator
    ) -> list[str]:
        ids, mask, positions = self._prompts(texts)
        newline = torch.tensor(
            ["\n" in self.tokenizer.decode([i]) for i in range(len(self.tokenizer))]
        )
        end = self.tokenizer.eos_token_id
        left = torch.full((len(texts),), lines)
        written: list[list[int]] = [[] for _ in texts]
        cache = None
        for _ in range(most):
            out = self.model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            if heat > 0:
                token = torch.multinomial((logits / heat).softmax(-1), 1, generator=noise)[:, 0]
            else:
                token = logits.argmax(-1)
            for row in range(len(texts)):
                if left[row] > 0 and token[row] != end:
                    written[row].append(int(token[row]))
            left -= (newline[token] | (token == end)).long()
            if bool((left <= 0).all()):
                break
            ids, positions = token[:, None], positions[:, -1:] + 1
            mask = torch.cat((mask, mask.new_ones(len(texts), 1)), 1)
        return [self.tokenizer.decode(row) for row in written]

    def complete(
        self, texts: Sequence[str], lines: int, most: int, heat: float = 0.0, seed: int = 0
    ) -> list[list[str]]:
        """Continues each text by so many lines (each ends in a newline) or at most so many
        tokens."""
        noise = torch.Generator().manual_seed(seed)
        done: list[str] = []
        for at in range(0, len(texts), self.batch):
            done += self._continue(texts[at : at + self.batch], lines, most, heat, noise)
        return [text.splitlines(keepends=True) for text in done]

    @torch.inference_mode()
    def verdicts(self, texts: Sequence[str], values: dict[str, float]) -> list[float]:
        """The value of each text that ends in a question: verdict values weighted by their
        probabilities."""
        words = [self.tokenizer(word, add_special_tokens=False).input_ids for word in values]
        if any(len(word) != 1 for word in words):
            raise ValueError("a verdict is not one token")
        worth = torch.tensor(list(values.values()))
        found: list[float] = []
        for at in range(0, len(texts), self.batch):
            ids, mask, positions = self._prompts(texts[at : at + self.batch])
            logits = self.model(
                ids, attention_mask=mask, position_ids=positions, logits_to_keep=1
            ).logits
            chances = logits[:, -1, [word[0] for word in words]].float().softmax(-1)
            found += (chances @ worth).tolist()
        return found


def random_states(problem: Problem, rng: random.Random, each: int) -> list[list[str]]:
    """Paths of one and of two random legal steps, `each` of both, without repetition."""
    found: list[list[str]] = []
    for depth in (1, 2):
        for _ in range(each):
            state: Any = tuple(sorted(problem.data["numbers"]))
            path = []
            for _ in range(depth):
                step = rng.choice(legal_steps(state))
                path.append(step.text)
                state = step.left
            if path not in found:
                found.append(path)
    return found


def tree_search(
    reasoner: Reasoner,
    task: Game24,
    problems: Sequence[Problem],
    beam: int,
    proposals: int,
    seed: int,
) -> tuple[list[bool], list[bool], list[list[tuple[float, bool]]]]:
    """Breadth-first Tree of Thoughts with the model's own verdicts.

    Returns:
        whether the best judged leaf is right, whether any kept leaf is, per problem; (value, label)
        of all states.
    """
    kept: list[list[tuple[float, list[str]]]] = [[(1.0, [])] for _ in problems]
    judged: list[list[tuple[float, bool]]] = [[] for _ in problems]
    for depth in range(3):
        asks = [
            (index, path)
            for index, states in enumerate(kept)
            for _, path in states
            for _ in range(proposals)
        ]
        texts = [task.prompt(problems[index]) + "".join(path) for index, path in asks]
        lines = reasoner.complete(texts, 1, task.boundary.max_tokens, 1.0, seed + depth)
        fresh: list[list[list[str]]] = [[] for _ in problems]
        for (index, path), line in zip(asks, lines, strict=True):
            longer = path + line[:1]
            if longer not in fresh[index]:
                fresh[index].append(longer)
        flat = [(index, path) for index, paths in enumerate(fresh) for path in paths]
        question = task.question(problems[0], [])
        asked = [task.prompt(problems[i]) + "".join(path) + question.text for i, path in flat]
        values = reasoner.verdicts(asked, dict(question.values))
        kept = [[] for _ in problems]
        for (index, path), value in zip(flat, values, strict=True):
            kept[index].append((value, path))
            if depth < 2:
                judged[index].append((value, task.value(problems[index], path) == 1.0))
        kept = [sorted(states, key=lambda state: -state[0])[:beam] for states in kept]

    def right(problem: Problem, path: Sequence[str]) -> bool:
        return task.grade(problem, task.answer(problem, path)).correct

    first = [right(p, states[0][1]) for p, states in zip(problems, kept, strict=True)]
    some = [
        any(right(p, path) for _, path in states) for p, states in zip(problems, kept, strict=True)
    ]
    return first, some, judged


def evaluate(reasoner: Reasoner, args: argparse.Namespace) -> dict[str, Any]:
    """Everything the module's docstring names, as JSON-able data."""
    task = Game24()
    rng = random.Random(args.seed)
    problems = list(task.problems(args.split, args.n))
    prompts = [task.prompt(problem) for problem in problems]
    report: dict[str, Any] = {
        "model": Path(args.model).name,
        "split": args.split,
        "seed": args.seed,
    }

    def right(problem: Problem, path: Sequence[str]) -> bool:
        return task.grade(problem, task.answer(problem, path)).correct

    greedy = reasoner.complete(prompts, 3, 80)
    report["greedy"] = share([right(p, path) for p, path in zip(problems, greedy, strict=True)])
    samples = reasoner.complete([t for t in prompts for _ in range(8)], 3, 80, 1.0, args.seed)
    marks = [right(problems[i // 8], path) for i, path in enumerate(samples)]
    report["sampled"] = share(marks)
    report["any_of_8"] = share([any(marks[i : i + 8]) for i in range(0, len(marks), 8)])
    legal = []
    for i, path in enumerate(samples):
        state: Any = tuple(sorted(problems[i // 8].data["numbers"]))
        for line in path:
            step = take(state, line)
            legal.append(step is not None)
            if step is None:
                break
            state = step.left
    report["legal_steps"] = share(legal)

    first, some, judged = tree_search(
        reasoner, task, problems[: args.tree], args.beam, args.proposals, args.seed
    )
    report["tree"] = {
        "beam": args.beam,
        "proposals": args.proposals,
        "first": share(first),
        "any": share(some),
        "greedy_on_these": share(
            [right(p, path) for p, path in zip(problems, greedy, strict=True)][: args.tree]
        ),
    }
    groups: dict[int, list[list[tuple[float, bool]]]] = {1: [], 2: []}
    question = task.question(problems[0], [])
    paths = [(i, path) for i, p in enumerate(problems) for path in random_states(p, rng, 4)]
    asked = [prompts[i] + "".join(path) + question.text for i, path in paths]
    values = reasoner.verdicts(asked, dict(question.values))
    for depth, found in groups.items():
        found.extend([] for _ in problems)
        for (i, path), value in zip(paths, values, strict=True):
            if len(path) == depth:
                found[i].append((value, task.value(problems[i], path) == 1.0))
    both = [one + two for one, two in zip(groups[1], groups[2], strict=True)]
    report["judge"] = {
        "random": area_of(both),
        "random_depth_1": area_of(groups[1]),
        "random_depth_2": area_of(groups[2]),
        "proposed": area_of(judged),
    }
    words = Chains()
    report["chains"] = {}
    for steps in args.steps:
        stream = random.Random(f"evaluate {steps}")
        chosen: list[Problem] = []
        while len(chosen) < args.words:
            problem = words.draw(stream, steps)
            if next_split(problem) == "test":
                chosen.append(problem)
        done = reasoner.complete([words.prompt(p) for p in chosen], steps + 2, 24 * (steps + 2))
        report["chains"][str(steps)] = share(
            [
                words.grade(p, words.answer(p, path)).correct
                for p, path in zip(chosen, done, strict=True)
            ]
        )
    rooms = Recall()
    chosen = list(rooms.problems("test", args.words))
    done = reasoner.complete([rooms.prompt(p) for p in chosen], 40, 300)
    ends = [
        next((path[: i + 1] for i, line in enumerate(path) if line.startswith("Answer:")), path)
        for path in done
    ]
    report["recall"] = share(
        [
            rooms.grade(p, rooms.answer(p, path)).correct
            for p, path in zip(chosen, ends, strict=True)
        ]
    )
    return report


def next_split(problem: Problem) -> str:
    """The split a problem belongs to."""
    from arbor.tasks.splits import split_of

    return split_of(problem.id)


def table(report: dict[str, Any]) -> str:
    """The report as the Markdown table of the model card."""
    rows: list[tuple[str, dict[str, Any]]] = [
        ("Game of 24, greedy", report["greedy"]),
        ("Game of 24, one sample at temperature 1", report["sampled"]),
        ("Game of 24, any of 8 samples", report["any_of_8"]),
        ("lines of a sample that are legal", report["legal_steps"]),
        (
            "Game of 24, greedy, on the problems of the next two rows",
            report["tree"]["greedy_on_these"],
        ),
        (
            f"Tree of Thoughts, beam {report['tree']['beam']}, best judged leaf",
            report["tree"]["first"],
        ),
        (f"Tree of Thoughts, beam {report['tree']['beam']}, any kept leaf", report["tree"]["any"]),
    ]
    rows += [(f"chains, {n} steps, greedy", found) for n, found in report["chains"].items()]
    rows.append(("recall, greedy", report["recall"]))
    lines = ["| what | share | n | 95 % interval |", "|---|---|---|---|"]
    for name, found in rows:
        low, high = found["interval"]
        lines.append(f"| {name} | {found['share']:.1%} | {found['n']} | {low:.1%} to {high:.1%} |")
    lines += [
        "",
        "| judge, area under the ROC curve | area | states | 95 % interval |",
        "|---|---|---|---|",
    ]
    for name, found in report["judge"].items():
        low, high = found["interval"]
        shown = f"{name.replace('_', ' ')} ({found['positive']:.0%} positive)"
        lines.append(
            f"| {shown} | {found['area']:.3f} | {found['n_states']} | {low:.3f} to {high:.3f} |"
        )
    head = f"Held-out split `{report['split']}`, seed {report['seed']}, plain Hugging Face generation, float32."
    return "\n".join([head, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=SAPLING, help="directory in Hugging Face's format")
    parser.add_argument("--split", default="test", choices=("validation", "test", "hard"))
    parser.add_argument("--n", type=int, default=300, help="problems for greedy, samples and judge")
    parser.add_argument("--tree", type=int, default=100, help="problems for the tree search")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--proposals", type=int, default=8)
    parser.add_argument("--words", type=int, default=50, help="word problems per number of steps")
    parser.add_argument("--steps", type=int, nargs="*", default=(2, 4, 6, 8, 12, 16))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small n, validation split, one line")
    parser.add_argument("--card", type=Path, help="write the results into this model card")
    parser.add_argument("--json", type=Path, help="also write the report here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.split, args.n, args.tree, args.words, args.steps = "validation", 60, 40, 20, (2, 4, 8)
    start = time.monotonic()
    report = evaluate(Reasoner.load(args.model), args)
    report["elapsed_s"] = round(time.monotonic() - start, 1)
    print(json.dumps(report, indent=None if args.quick else 2), flush=True)
    if args.card:
        begin, end = "<!-- results -->", "<!-- /results -->"
        head, _, rest = args.card.read_text().partition(begin)
        tail = rest.partition(end)[2]
        args.card.write_text(f"{head}{begin}\n{table(report)}\n{end}{tail}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
