"""Reward models: the mirror's scores against transformers' own classes, its KV, and its formats."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.reward_models import (
    CHAT,
    PROBLEM,
    byte_tokenizer,
    levels,
    qwen_score,
    save,
    save_qwen_prm,
    sequence_score,
    shape,
    tag_score,
    token_score,
)
from support.slow_cases import every

from arbor.errors import UsageError
from arbor.events import Event, Scored
from arbor.tree import Node, ThoughtTree
from arbor.verifiers.base import Placement, SearchShape, Verdict
from arbor.verifiers.reward.engine import RewardEngine
from arbor.verifiers.reward.mirror import Mirror
from arbor.verifiers.reward_model import (
    OutcomeRewardModel,
    ProcessRewardModel,
    RewardModel,
)

SHEPHERD = (" ки", " +", " -")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A reward model on disk, its settings, and the score of a path by transformers alone."""

    verifier: RewardModel
    score: Callable[[Path, Sequence[int]], float]


def case(name: str, folder: Path) -> Case:
    """A reward model of each format and of several architectures."""
    path = str(folder)
    chat, tags = byte_tokenizer(chat=True), byte_tokenizer(*SHEPHERD)
    match name:
        case "orm-llama":
            save(
                folder,
                "AutoModelForSequenceClassification",
                "llama",
                byte_tokenizer(),
                num_labels=1,
            )
            return Case(OutcomeRewardModel(path), sequence_score)
        case "orm-qwen2-chat":
            save(folder, "AutoModelForSequenceClassification", "qwen2", chat, num_labels=1)
            return Case(OutcomeRewardModel(path), sequence_score)
        case "prm-gemma2-sequence":
            save(
                folder, "AutoModelForSequenceClassification", "gemma2", byte_tokenizer(), num_labels=1,
                head_dim=8, sliding_window=9,
            )  # fmt: skip
            return Case(ProcessRewardModel(path), sequence_score)
        case "prm-mistral-tokens":
            save(
                folder, "AutoModelForTokenClassification", "mistral", byte_tokenizer(), num_labels=2,
                head_dim=8, sliding_window=9,
            )  # fmt: skip
            return Case(ProcessRewardModel(path), token_score)
        case "prm-gpt2-tokens":
            save(
                folder, "AutoModelForTokenClassification", "gpt2", byte_tokenizer(), num_labels=2,
                n_embd=32, n_layer=3, n_head=4, n_positions=512,
            )  # fmt: skip
            return Case(ProcessRewardModel(path), token_score)
        case "math-shepherd":
            save(folder, "AutoModelForCausalLM", "mistral", tags, head_dim=8)
            good, bad = (tags.encode(tag)[0] for tag in SHEPHERD[1:])
            return Case(ProcessRewardModel(path), tag_score(good, bad))
        case "qwen-prm":
            save_qwen_prm(folder, byte_tokenizer("<extra_0>", chat=True))
            return Case(ProcessRewardModel(path), qwen_score)
    raise AssertionError(name)


CASES = (
    "orm-llama", "orm-qwen2-chat", "prm-gemma2-sequence", "prm-mistral-tokens", "prm-gpt2-tokens",
    "math-shepherd", "qwen-prm",
)  # fmt: skip


class Opened:
    """A reward model with one search open.

    Attributes:
        mirror: the search's.
        events: what it reported.
    """

    def __init__(self, verifier: RewardModel, search: SearchShape | None = None) -> None:
        self.engine = RewardEngine(verifier, Placement(device="cpu", debug=True))
        self.search = search or shape()
        self.plan = self.engine.plan(self.search)
        self.events: list[Event] = []
        self.mirror: Mirror = self.engine.open(
            self.search, self.plan, self.plan.budget_tokens, self.events.append
        )

    def judge(self, nodes: Sequence[Node]) -> Verdict:
        """The verdict on some blocks, with as many forwards as it takes."""
        judging = self.mirror.begin(nodes)
        while not judging.done:
            self.engine.load().step()
        return judging.verdict()

    def ids(self, node: Node) -> list[int]:
        """The tokens at whose end a block is scored, by the format alone."""
        before, end = self.engine.prefix(self.search.task, self.search.problem)
        for place, text in enumerate(node.thoughts):
            before = before + self.engine.step_tokens(text, first=place == 0)
        return before + end


def small(verifier: RewardModel) -> str:
    """The smallest budget that works."""
    engine = RewardEngine(verifier, Placement(device="cpu"))
    return f"{engine.plan(shape()).enough_tokens}tok"


# Agreement


@pytest.mark.parametrize("name", every(3, CASES))
def test_scores_are_those_of_transformers_for_each_path_from_nothing(
    name: str, tmp_path: Path
) -> None:
    made = case(name, tmp_path / "model")
    folder, tree = tmp_path / "model", levels()
    full = Opened(made.verifier)
    wanted = [[made.score(folder, full.ids(node)) for node in level] for level in tree]

    values = [full.judge(level).values for level in tree]

    assert len({round(value, 3) for level in wanted for value in level}) > 6, "scores hardly differ"
    for level, own in zip(values, wanted, strict=True):
        assert level == pytest.approx(own, abs=TOLERANCE)
    cost = full.mirror.cost
    assert cost.recomputed == 0
    assert cost.computed < 0.75 * sum(len(full.ids(node)) for level in tree for node in level)

    least = Opened(type(made.verifier)(str(folder), budget=small(made.verifier)))
    again = [least.judge(level).values for level in tree]

    for level, own in zip(again, wanted, strict=True):
        assert level == pytest.approx(own, abs=TOLERANCE)
    assert least.mirror.cost.recomputed > 0, "the smallest budget evicted nothing"
    assert least.mirror.cost.peak <= least.plan.enough_tokens < full.mirror.cost.peak


@pytest.mark.parametrize("steps", every(3, ["last", "min", "mean", "product"]))
def test_a_path_is_valued_by_the_scores_of_its_steps(steps: Any, tmp_path: Path) -> None:
    made = case("prm-mistral-tokens", tmp_path / "model")
    opened = Opened(ProcessRewardModel(made.verifier.model, steps=steps))
    leaves = levels()[-1]
    own = [
        [made.score(tmp_path / "model", opened.ids(node)) for node in leaf.path[1:]]
        for leaf in leaves
    ]
    rule: Callable[[list[float]], float] = {
        "last": lambda scores: scores[-1],
        "min": min,
        "mean": lambda scores: sum(scores) / len(scores),
        "product": math.prod,
    }[steps]

    verdict = opened.judge(leaves)  # the levels above were never judged

    assert verdict.values == pytest.approx([rule(scores) for scores in own], abs=TOLERANCE)
    if steps == "last":
        assert verdict.scores == ()
    else:
        assert verdict.scores == pytest.approx([each[-1] for each in own], abs=TOLERANCE)


def test_many_searches_share_the_engine_and_have_the_scores_they_have_alone(
    tmp_path: Path,
) -> None:
    path = case("math-shepherd", tmp_path / "model").verifier.model
    long = "Judge each step of the solution, one after another: {problem} "
    verifier = ProcessRewardModel(path, prompt=long)
    alone = Opened(verifier)
    tree = levels()
    wanted = [alone.judge(level).values for level in tree]
    shared = Opened(verifier)
    pool = 2 * shared.plan.budget_tokens
    shared.mirror.close()
    mirrors = [
        shared.engine.open(shared.search, shared.plan, pool, lambda event: None) for _ in range(3)
    ]

    for level, own in zip(tree, wanted, strict=True):
        judging = [mirror.begin(level) for mirror in mirrors]
        forwards = 0
        while not all(each.done for each in judging):
            shared.engine.load().step()
            forwards += 1
        assert forwards == 1, "one forward serves all searches"
        for each in judging:
            assert each.verdict().values == pytest.approx(own, abs=TOLERANCE)
    shared_prompt = len(alone.mirror.tree.root.tokens) - 1  # the last one runs for each
    computed = sum(mirror.cost.computed for mirror in mirrors)
    assert 3 * alone.mirror.cost.computed - computed >= shared_prompt
    for mirror in mirrors:
        mirror.close()
    assert not shared.engine.load().state.trees


# The mirror


def test_a_block_is_scored_once_and_equal_steps_are_one_block(tmp_path: Path) -> None:
    opened = Opened(case("prm-mistral-tokens", tmp_path / "model").verifier)
    first, second = levels(depth=1)[0]
    second.text = f"  {first.text}"  # a process reward model reads steps without white space

    values = opened.judge([first, second]).values
    opened.judge([first])

    assert values[0] == values[1]
    assert [event.steps for event in opened.events if isinstance(event, Scored)] == [1, 0]
    assert len(opened.mirror.tree) == 2


@pytest.mark.parametrize("steps", ["last", "min", "mean", "product"])
def test_a_path_without_a_token_is_scored_at_the_end_of_its_prompt(
    steps: Any, tmp_path: Path
) -> None:
    made = case("prm-gemma2-sequence", tmp_path / "model")
    opened = Opened(ProcessRewardModel(made.verifier.model, steps=steps, separator=""))
    blank, other = levels(depth=1)[0]
    blank.text = " \n"

    values = opened.judge([blank, other]).values

    assert values == pytest.approx(
        [made.score(tmp_path / "model", opened.ids(node)) for node in (blank, other)], abs=TOLERANCE
    )
    opened.mirror.forget([other, blank])


def test_a_path_may_have_more_blocks_than_python_recurses(tmp_path: Path) -> None:
    opened = Opened(case("prm-gpt2-tokens", tmp_path / "model").verifier)
    tree = ThoughtTree([0])
    node = tree.root
    for _ in range(1200):
        node = tree.fork(node)
        node.text = " \n" if node.depth > 3 else "Add 1.\n"
    mirror = opened.mirror
    mirror._step_tokens = lambda text, *, first: list(text.strip().encode())

    (end,) = mirror.begin([node])._ends

    assert end.depth == 3 and mirror.begin([node])._ends == [end]


# Formats


def text_of(verifier: RewardModel, *steps: str) -> str:
    """The whole text that a reward model reads for some steps."""
    engine = RewardEngine(verifier, Placement(device="cpu"))
    search = shape()
    before, end = engine.prefix(search.task, PROBLEM)
    for place, step in enumerate(steps):
        before = before + engine.step_tokens(step, first=place == 0)
    return str(engine.tokenizer.decode(before + end))


def test_math_shepherd_reads_what_its_model_card_shows(tmp_path: Path) -> None:
    made = case("math-shepherd", tmp_path / "model")

    text = text_of(made.verifier, "Step 1: 2+3 = 5.\n", "Step 2: The answer is: 5\n")

    assert text == "What is 2+3? Step 1: 2+3 = 5. ки\nStep 2: The answer is: 5 ки"


# Errors


@pytest.mark.parametrize(
    ("template", "words", "hint"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate.", "Use chat=off"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
            + CHAT,
            *("No system role.", "Use system='', or chat=off"),
        ),
        ("{% for", "chat template fails: ", "Use chat=off"),
    ],
)
def test_a_chat_template_that_fails_is_an_error_of_the_settings(
    tmp_path: Path, template: str, words: str, hint: str
) -> None:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = template
    folder = tmp_path / "model"
    save(folder, "AutoModelForSequenceClassification", "llama", tokenizer, num_labels=1)
    system = "Be good." if "system" in template else ""
    engine = RewardEngine(OutcomeRewardModel(str(folder), system=system), Placement(device="cpu"))

    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        engine.plan(shape())

    assert caught.value.code == "reward-chat" and caught.value.hint.startswith(hint)
