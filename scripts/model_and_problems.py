"""Which model solves which problems: the options of scripts that evaluate or measure searches.

    python scripts/bench_ratio.py --model ./model.gguf --dataset gsm8k.jsonl --task gsm8k
    python scripts/eval_attention.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k

Without them the built-in model solves a task's own problems. Of a data set, what a script calls
training problems is its split `calibration`, and what it calls test problems is `evaluation`.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from arbor import components
from arbor.cli.evaluation.eval_dataset import read_samples
from arbor.cli.evaluation.eval_options import DatasetOptions
from arbor.run.solution import Solution
from arbor.tasks.base import Problem, Task
from arbor.tasks.worded import Worded

SAPLING = "builtin:sapling"
# Names of published data sets: where they are, and the task that reads them.
DATASETS = {
    "gsm8k": ("hf:openai/gsm8k/main:test", "gsm8k"),
    "math500": ("hf:HuggingFaceH4/MATH-500:test", "math"),
    "arc": ("hf:allenai/ai2_arc/ARC-Challenge:test", "arc"),
}


def add_model_and_problems(parser: argparse.ArgumentParser, task: str | None = "game24") -> None:
    """Adds ``--model``, ``--dataset`` and ``--task``.

    Args:
        parser: of the script.
        task: the default of ``--task``; None: the script follows another option.
    """
    parser.add_argument("--model", default=SAPLING, help="a directory, a GGUF file, a Hub id")
    parser.add_argument(
        "--dataset",
        metavar="FILE|hf:…|NAME",
        help=f"problems: a file, hf:…, {', '.join(DATASETS)}; default: the task's own",
    )
    parser.add_argument(
        "--task",
        metavar="NAME[,KEY=VALUE]",
        help="solves and grades; default: that of a named data set"
        + (f", else {task}" if task else ""),
    )
    parser.set_defaults(usual_task=task)


def task_of(given: argparse.Namespace) -> str:
    """The task: that of ``--task``, of a named data set, or the script's default."""
    named = DATASETS.get(given.dataset or "", ("", None))[1]
    found: str | None = given.task or named or given.usual_task
    if found is None:
        raise SystemExit("--dataset needs --task, which reads and grades its problems")
    return found


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """The model and the task as settings of `Solver`."""
    return {"model": given.model, "task": task_of(given)}


def tree_of(solution: Solution) -> list[tuple[int | None, str]]:
    """Every block's parent and text; none of a search that failed."""
    if solution.error is not None:
        return []
    blocks = solution.replay().blocks
    return [(blocks[number].parent, blocks[number].text) for number in sorted(blocks)]


def verifier_of_chains(task: str) -> str:
    """The verifier of single chains: ``exact``, which asks the model nothing, where the task has an
    exact checker, else ``self``."""
    return "self" if isinstance(components.build("task", task), Worded) else "exact"


def problems_of(
    given: argparse.Namespace, task: Task, n: int, split: str = "test"
) -> list[Problem]:
    """The first n problems of a split, as the task reads them.

    Args:
        given: the script's options.
        task: the solver's.
        n: problems; fewer where there are fewer.
        split: of the task's own problems; of a data set ``train`` is ``calibration``, and any other
            split ``evaluation``.

    Raises:
        ArborError: they cannot be read.
    """
    if given.dataset is None:
        return list(itertools.islice(task.problems(split, n), n))
    options = DatasetOptions(
        dataset=DATASETS.get(given.dataset, (given.dataset,))[0],
        split="calibration" if split == "train" else "evaluation",
        limit=str(n),
    )
    samples = read_samples(options, task, stop_on_error=True)
    return [each.problem for each in samples if each.problem is not None]
