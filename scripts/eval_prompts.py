r"""Which prompt a task should have, and where thoughts end in what models write.

    python scripts/eval_prompts.py chains --model m.gguf --dataset gsm8k-test.jsonl --rows 501 700 \
        --forms hashes boxed --out chains
    python scripts/eval_prompts.py accuracy chains/*.jsonl --csv docs/experiments/prompts.csv
    python scripts/eval_prompts.py thoughts chains/*.jsonl --model m.gguf --rows 501 525 \
        --csv docs/experiments/thoughts.csv

`chains` decodes one greedy chain of each problem as plain text, without steps, and keeps it; the
same command goes on where it was stopped. `accuracy` grades such chains, `thoughts` divides them by
several rules.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment_table import ExperimentTable, add_options

from arbor import Solver
from arbor.events import Boundary
from arbor.measure.statistics import clopper_pearson
from arbor.model.sampling_params import Sampling
from arbor.run.choices import PathTokens
from arbor.run.conversation import conversation_tokens, plain_decoding
from arbor.tasks.base import Problem
from arbor.tasks.plain_text import SteppedText, plain_problem
from arbor.tasks.prompt_template import read_template
from arbor.tasks.reasoning import GSM8K
from arbor.tasks.worded import ends_paragraph, is_open

ASK = "Please reason step by step, and put your final answer within \\boxed{}."
LINES = (
    "Solve the problem. Reason step by step, one step per line. End with a line that has only #### "
    "and the answer as a number.\n\nQuestion: {problem}\nAnswer:\n"
)
Message = dict[str, str]
Rule = Callable[[str, int], bool]


def solved() -> Iterator[tuple[str, list[str], str]]:
    """Problem, steps and answer of the examples of gsm8k's template."""
    for each in read_template("gsm8k").examples:
        *steps, last = each.solution.strip().splitlines()
        yield each.problem, steps, last.rpartition(" ")[2].strip(".$}").rpartition("{")[2]


def turns(question: str, ask: str, end: str, between: str) -> list[Message]:
    """The examples as earlier turns of the chat, then the question.

    Args:
        question: the problem.
        ask: a user's message, with ``{problem}``.
        end: the last line of a solution, with ``{answer}``.
        between: steps.
    """
    messages = []
    for problem, steps, answer in solved():
        said = between.join([*steps, end.replace("{answer}", answer)])
        messages.append({"role": "user", "content": ask.replace("{problem}", problem)})
        messages.append({"role": "assistant", "content": said})
    return [*messages, {"role": "user", "content": ask.replace("{problem}", question)}]


def examples(question: str, names: tuple[str, str], end: str) -> str:
    """The examples as text, then the question: for base models, as lm-eval's tasks have it."""
    question_word, answer_word = names
    shown = "".join(
        "\n".join(
            [f"{question_word}: {problem}\n{answer_word}: {steps[0]}", *steps[1:], end]
        ).replace("{answer}", answer)
        + "\n\n"
        for problem, steps, answer in solved()
    )
    return f"{shown}{question_word}: {question}\n{answer_word}:"


# of a problem: messages of a chat or a text, and strings that end the chain
FORMS: dict[str, tuple[Callable[[str], list[Message] | str], tuple[str, ...]]] = {
    "hashes": (lambda q: [{"role": "user", "content": LINES.replace("{problem}", q)}], ()),
    "boxed": (lambda q: [{"role": "user", "content": f"{q}\n{ASK}"}], ()),
    "boxed, system message": (
        lambda q: [{"role": "system", "content": ASK}, {"role": "user", "content": q}],
        (),
    ),
    "boxed, four turns": (
        lambda q: turns(q, f"{{problem}}\n{ASK}", "The answer is \\boxed{{answer}}.", "\n\n"),
        (),
    ),
    "hashes, four turns": (lambda q: turns(q, "Question: {problem}", "#### {answer}", "\n"), ()),
    "hashes, four examples as text": (
        lambda q: examples(q, ("Question", "Answer"), "#### {answer}"),
        ("Question:",),
    ),
    "boxed, four examples as text": (
        lambda q: examples(q, ("Question", "Answer"), "The answer is \\boxed{{answer}}."),
        ("Question:",),
    ),
}

RULES: dict[str, tuple[Rule, int]] = {
    "line": (lambda text, _: "\n" in text, 96),
    "empty line": (lambda text, _: "\n\n" in text, 128),
    "paragraph": (ends_paragraph, 192),
}


def chains(given: argparse.Namespace) -> None:
    """Decode a chain of each problem in each form, and keep them."""
    rows = [json.loads(line) for line in given.dataset.read_text("utf-8").splitlines()]
    first, last = given.rows
    given.out.mkdir(parents=True, exist_ok=True)
    with Solver(
        given.model,
        task=SteppedText(),
        controller="chain",
        verifier="exact",
        dtype=given.dtype,
        threads=1,
        record_bytes=0,
    ) as solver:
        solver.load()
        for form in given.forms:
            name = f"{Path(given.model).stem}.{form.replace(',', '').replace(' ', '-')}"
            path = given.out / f"{given.dataset.stem}.{name}.jsonl"
            done = {each["n"] for each in read([path])} if path.exists() else set()
            numbers = [n for n in range(first, min(last, len(rows)) + 1) if n not in done]
            with path.open("a", encoding="utf-8") as file:
                for row in decoded(solver, form, numbers, rows, given.tokens):
                    known = {"model": Path(given.model).stem, "data": given.dataset.stem}
                    file.write(json.dumps({**known, "form": form, **row}) + "\n")
            print(path, len(numbers), "new chains")


def decoded(
    solver: Solver, form: str, numbers: Sequence[int], rows: Sequence[Any], most: int
) -> Iterator[dict[str, Any]]:
    """The greedy chain of each problem, 32 at a time in one engine."""
    build, ends = FORMS[form]
    shared = solver.shared(32, 32 * (most + 1500))
    greedy = plain_decoding(ends, most, Sampling(temperature=0.0))
    jobs = []
    for n in numbers:
        prompt = build(rows[n - 1]["question"])
        encoder = solver.tokenizer
        ids = encoder.encode(prompt) if isinstance(prompt, str) else None
        ids = conversation_tokens(encoder, prompt) if ids is None else ids  # type: ignore[arg-type]
        run = shared.prepare(plain_problem(list(ids), ""), {"seed": 0}, **greedy)
        jobs.append((n, len(ids), shared.begin(run)))
    for n, length, job in jobs:
        solution, paths, stop = job.solution(), PathTokens(), ""
        while (event := job.events.get()) is not None:
            paths.feed(event)
            stop = event.stop if isinstance(event, Boundary) else stop
        tokens = paths.ids(solution.path[-1])
        text = solver.tokenizer.decode(tokens, skip_special_tokens=True)
        chain = {"text": text, "ids": tokens, "tokens": len(tokens), "stop": stop}
        yield {"n": n, "prompt_tokens": length, "key": rows[n - 1]["answer"], **chain}


def read(paths: Sequence[Path], rows: Sequence[int] = ()) -> list[dict[str, Any]]:
    """The chains of files, those of some problems."""
    every = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    return [each for each in every if not rows or rows[0] <= each["n"] <= rows[1]]


def graded_chain(chain: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether a chain is right, its answer a guess, and itself cut."""
    task = GSM8K()
    _, key = task.entry({}, "", chain["key"])
    problem = Problem("", task.name, "", expected=key)
    said = [chain["text"]]
    right = task.grade(problem, task.answer(problem, said)).correct
    return bool(right), task.is_guess(problem, said), chain["stop"] == "length"


def accuracy(given: argparse.Namespace) -> None:
    """Grade the chains of each file."""
    table = ExperimentTable(given)
    for path in given.files:
        found = read([path], given.rows)
        graded = [graded_chain(each) for each in found]
        right, guessed, cut = map(sum, zip(*graded, strict=True))
        low, high = clopper_pearson(right, len(found))
        row = {
            "model": found[0]["model"],
            "form": found[0]["form"],
            "rows": f"{found[0]['n']} to {found[-1]['n']}",
            "right_percent": round(100 * right / len(found), 1),
            "right_low_percent": round(100 * low, 1),
            "right_high_percent": round(100 * high, 1),
            "guessed": guessed,
            "cut": cut,
            "prompt_tokens": round(statistics.mean(each["prompt_tokens"] for each in found)),
            "chain_tokens": round(statistics.mean(each["tokens"] for each in found)),
            "n": len(found),
            "n_of": "problems",
        }
        table.show(row)


def thoughts(given: argparse.Namespace) -> None:
    """Divide the chains of each file into thoughts, by every rule."""
    from transformers import AutoTokenizer

    table = ExperimentTable(given)
    place = Path(given.model)
    files = {"gguf_file": place.name} if place.is_file() else {}
    tokenizer = AutoTokenizer.from_pretrained(place.parent if files else place, **files)
    for path in given.files:
        found = read([path], given.rows)
        for name, (rule, most) in RULES.items():
            divided = [divide(tokenizer, each["ids"], rule, most) for each in found]
            every = [thought for each in divided for thought in each]
            lengths = [count for _, count, _ in every]
            ended = [text for text, _, ends in every if ends]

            def share(kind: Sequence[Any], of: Sequence[Any] = every) -> float:
                return round(100 * len(kind) / len(of), 1)

            row = {
                "model": found[0]["model"],
                "data": found[0]["data"],
                "rule": name,
                "thoughts_mean": round(statistics.mean(map(len, divided)), 1),
                "thoughts_most": max(map(len, divided)),
                "thought_tokens": round(statistics.mean(lengths), 1),
                "thought_tokens_90th": sorted(lengths)[9 * len(lengths) // 10],
                "only_a_mark_percent": share([t for t, _, _ in every if t.strip() in MARKS]),
                "in_a_display_percent": share([t for t in ended if is_open(t)]),
                "announcement_percent": share(
                    [t for t in ended if t.rstrip("*_ \n").endswith(":")]
                ),
                "cut_percent": share([n for _, n, ends in every if not ends and n == most]),
                "n": len(found),
                "n_of": "chains",
            }
            table.show(row)


MARKS = ("", "\\[", "\\]", "$$", "```")


def divide(
    tokenizer: Any, ids: Sequence[int], rule: Rule, most: int
) -> list[tuple[str, int, bool]]:
    """The thoughts of a chain: text, tokens, and whether the rule has ended it."""
    found, thought = [], []
    for token in ids:
        thought.append(token)
        text = tokenizer.decode(thought, skip_special_tokens=True)
        ends = "\n" in tokenizer.decode([token]) and rule(text, len(thought))
        if ends or len(thought) == most:
            found.append((text, len(thought), ends))
            thought = []
    if thought:
        found.append((tokenizer.decode(thought, skip_special_tokens=True), len(thought), False))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for run in (chains, accuracy, thoughts):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--rows", nargs=2, type=int, default=(1, 10**6), help="first, last")
        if run is not accuracy:
            command.add_argument("--model", required=True, help="a GGUF file or a directory")
        if run is chains:
            command.add_argument("--dataset", type=Path, required=True, help="question, answer")
            command.add_argument("--forms", nargs="+", choices=FORMS, default=["boxed"])
            command.add_argument("--tokens", type=int, default=1024, help="of a chain at most")
            command.add_argument("--dtype", default="bfloat16")
            command.add_argument("--out", type=Path, required=True, help="folder of the chains")
        else:
            command.add_argument("files", nargs="+", type=Path, help="of `chains`")
            command.add_argument("--commit", help="of the chains, for the table")
            add_options(command)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
