"""Majority by llama.cpp's parallel sequences: the answers and costs of what arbor is compared with.

    python scripts/bench_peers.py --install build/peers --peers llama.cpp    # once
    python scripts/bench_majority.py --folder build/peers --model model.Q4_K_M.gguf \\
        --dataset gsm8k.jsonl --n 300 --threads 2 --csv majority.csv

Each problem is solved greedily by one chain and by the majority of 2, 4, 8, 16 and 32 chains at
temperature 0.7 and top-p 0.9 as by arbor, each number in a run of its own. llama.cpp reads the
token ids that arbor's chain reads, with the same ends and the same most tokens of a chain; texts
are read, grouped and graded by arbor's task and its `majority`. Equal votes go by the order of the
chains.

A chain ends with a token that ends texts, and its cells are free then; arbor's ends with its
answer. Chain i has the same seed among any number of chains.

The same command goes on where it stopped: problems that the table has are left out. `--from` lets
several processes share the problems, each with a table of its own.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_peers import PACKAGES, PEERS, Peer, installed
from experiment_table import ExperimentTable, add_options
from model_and_problems import DATASETS, add_model_and_problems, settings_of

from arbor import Solver
from arbor.aggregate.majority import Majority
from arbor.cli.evaluation.eval_dataset import read_samples
from arbor.cli.evaluation.eval_options import DatasetOptions
from arbor.engine.token_source import ModelSampler
from arbor.measure.evaluation.dataset import sample_seed
from arbor.model.gguf.header import read_gguf_header
from arbor.model.gguf.tokenizer import ending_ids
from arbor.run.answers import AnswerGroups, ranked
from arbor.run.planning import encode_problem, fitted
from arbor.tasks.base import Problem, Task
from arbor.tree import NodeState, ThoughtTree

PEER = "llama.cpp"
SAMPLES = (1, 2, 4, 8, 16, 32)
TEMPERATURE, TOP_P = 0.7, 0.9  # of several chains; one is greedy
CELLS = 256  # by which llama.cpp rounds up
Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A problem as llama.cpp reads it.

    Attributes:
        place: in the dataset, from 1.
        sample: its id, that of `arbor compare` too.
        problem: as the task reads it, with its key.
        prompt: token ids.
    """

    place: int
    sample: str
    problem: Problem
    prompt: list[int]

    def asked(self, samples: int, most: int, ends: Sequence[int]) -> Row:
        """What `peers/llama_majority.py` reads.

        Args:
            samples: chains.
            most: tokens of a chain.
            ends: ids that end one.
        """
        return {
            "prompt": self.prompt,
            "samples": samples,
            "temperature": TEMPERATURE if samples > 1 else 0.0,
            "top_p": TOP_P,
            "max_tokens": most,
            "stop": list(ends),
            "seed": sample_seed(0, self.sample),
        }


def questions_of(given: argparse.Namespace, solver: Solver) -> list[Question]:
    """The problems that the options choose, as arbor's chain reads them.

    Raises:
        ArborError: they cannot be read.
    """
    dataset = DATASETS.get(given.dataset, (given.dataset,))[0]
    limit = f"{given.first}-{given.first + given.n - 1}"
    samples = read_samples(DatasetOptions(dataset=dataset, limit=limit), solver.task, True)
    task = fitted(solver.task, solver.tokenizer)
    return [
        Question(place, each.id, each.problem, encode_problem(solver.tokenizer, task, each.problem))
        for place, each in enumerate(samples, given.first)
        if each.problem is not None
    ]


def judged(
    tokenizer: Any,
    task: Task,
    question: Question,
    chains: Sequence[Sequence[int]],
    ends: Collection[int],
) -> Row:
    """The majority of the chains, and whether it is right, as a search of arbor has it.

    Args:
        tokenizer, task: of the model and of the problem.
        question: that the chains continue.
        chains: token ids, at least one each.
        ends: ids that end a chain; one without is cut unless the task takes it for whole.
    """
    tree, reader, problem = ThoughtTree(question.prompt), ModelSampler(tokenizer), question.problem
    for chain in chains:
        leaf = tree.fork(tree.root)
        for token in chain:
            tree.append(leaf, token)
        reader.finish(leaf)
        leaf.cut = chain[-1] not in ends and not task.is_terminal(problem, leaf.thoughts)
        leaf.state = NodeState.TERMINAL
    leaves = tree.nodes[1:]
    votes = ranked(Majority(), AnswerGroups(task, problem).paths(leaves))
    answer = votes[0].answer if votes else None
    return {
        "right": int(task.grade(problem, answer).correct),
        "votes": votes[0].votes if votes else 0,
        "cut": sum(leaf.cut for leaf in leaves),
    }


def known_rows(path: Path | None) -> list[Mapping[str, str]]:
    """The rows of a table; none before its first one."""
    if path is None or not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@contextmanager
def started(given: argparse.Namespace, questions: Sequence[Question], most: int) -> Iterator[Peer]:
    """llama.cpp with room for the longest prompt and its chains, warmed up."""
    chains = max(given.samples)
    cells = max(len(each.prompt) for each in questions) + chains * most
    words = [PEERS / "llama_majority.py", given.model, -(-cells // CELLS) * CELLS, chains]
    command = [installed(given.folder, PEER), *words, "--threads", given.threads]
    peer = Peer([str(word) for word in command])
    try:
        peer.ask(questions[0].asked(1, 4, ()))  # reads the weights for the first time
        yield peer
    finally:
        peer.close()


def named(given: argparse.Namespace, question: Question, samples: int) -> Row:
    """The columns that say what a row is of."""
    return {
        "model": given.model.stem,
        "dataset": Path(given.dataset).stem,
        "problem": question.place,
        "sample": question.sample,
        "package": PACKAGES[PEER][0],
        "threads": given.threads,
        "samples": samples,
    }


def options() -> argparse.Namespace:
    """The options.

    Raises:
        SystemExit: one of them cannot be.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model_and_problems(parser, "gsm8k")
    parser.add_argument("--folder", type=Path, default=Path("build/peers"), help="of --install")
    parser.add_argument("--n", type=int, default=100, help="problems")
    parser.add_argument(
        "--from", dest="first", type=int, default=1, metavar="PLACE", help="of the first problem"
    )
    parser.add_argument("--samples", type=int, nargs="+", default=list(SAMPLES), help="chains")
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp")
    add_options(parser)
    given = parser.parse_args()
    given.model = Path(given.model).absolute()
    if given.model.suffix != ".gguf" or given.dataset is None:
        parser.error("give --model FILE.gguf, which llama.cpp reads, and --dataset")
    for name in ("n", "first", "threads"):
        if getattr(given, name) < 1:
            option = "from" if name == "first" else name
            parser.error(f"--{option} is {getattr(given, name)}; give 1 or more")
    if min(given.samples) < 1:
        parser.error(f"--samples has {min(given.samples)}; give 1 or more")
    given.folder = given.folder.absolute()
    return given


def main() -> None:
    given = options()
    solver = Solver(**settings_of(given) | {"model": str(given.model)}, controller="chain")
    questions = questions_of(given, solver)
    known = {
        tuple(row.get(name, "") for name in named(given, questions[0], 1))
        for row in known_rows(given.csv)
    }
    missing = [
        (question, samples)
        for question in questions
        for samples in given.samples
        if tuple(map(str, named(given, question, samples).values())) not in known
    ]
    if not missing:
        print(f"{given.csv} has every row")
        return
    ends = ending_ids(read_gguf_header(given.model))
    task, most = fitted(solver.task, solver.tokenizer), solver.boundary.longest_path
    table = ExperimentTable(given)
    with started(given, questions, most) as peer:
        for question, samples in missing:
            found = peer.ask(question.asked(samples, most, ends))
            row = {
                **named(given, question, samples),
                **judged(solver.tokenizer, task, question, found["texts"], ends),
                "cpu_s": round(found["cpu_seconds"], 3),
                "wall_s": round(found["wall_seconds"], 3),
                "generated": sum(map(len, found["texts"])),
                "peak_kv_tokens": found["cells_peak"],
                "n": 1,
                "n_of": "problems",
            }
            table.show(row)


if __name__ == "__main__":
    main()
