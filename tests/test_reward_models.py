"""Reward models: the mirror's scores against transformers' own classes, its KV, and its formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.reward_models import (
    PROBLEM,
    byte_tokenizer,
    change_config,
    levels,
    qwen_score,
    save,
    save_qwen_prm,
    sequence_score,
    shape,
    spaced_tokenizer,
    tag_score,
    token_score,
)
from support.slow_cases import every

from arbor.errors import ArborError, BudgetInfeasible, InputError, ModelError, UsageError
from arbor.events import Event, Scored
from arbor.model.loading import ModelLocation
from arbor.model.scoring import label_count
from arbor.tree import Node
from arbor.verifiers.base import Placement, SearchShape, Verdict
from arbor.verifiers.reward.engine import RewardEngine, values_of
from arbor.verifiers.reward.mirror import Mirror
from arbor.verifiers.reward_model import (
    OutcomeRewardModel,
    ProcessRewardModel,
    RewardModel,
)
from arbor.verifiers.self_eval import CERTAIN

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


def test_a_verdict_takes_one_forward_and_reports_what_was_computed_and_reused(
    tmp_path: Path,
) -> None:
    opened = Opened(case("orm-llama", tmp_path / "model").verifier)
    tree = levels()
    paths = [[len(opened.ids(node)) for node in level] for level in tree]
    steps = [
        sum(len(opened.engine.step_tokens(node.text, first=node.depth == 1)) for node in level)
        for level in tree
    ]

    for level in tree:
        judging = opened.mirror.begin(level)
        opened.engine.load().step()
        assert judging.done
        judging.verdict()

    scored = [event for event in opened.events if isinstance(event, Scored)]
    assert [event.steps for event in scored] == [2, 4, 8]
    assert [event.path_tokens for event in scored] == [sum(level) for level in paths]
    prompt = len(opened.mirror.tree.root.tokens)
    assert [event.computed for event in scored] == [prompt + steps[0], steps[1], steps[2]]
    assert scored[-1].peak == prompt + sum(steps)
    assert all(event.recomputed == 0 and event.elapsed_s > 0 for event in scored)


def test_verdicts_in_progress_at_a_time_count_every_token_once(tmp_path: Path) -> None:
    opened = Opened(case("orm-llama", tmp_path / "model").verifier)
    first, second = levels(depth=1)[0]

    judging = [opened.mirror.begin([node]) for node in (first, second)]
    while not all(each.done for each in judging):
        opened.engine.load().step()
    for each in judging:
        each.verdict()

    scored = [event for event in opened.events if isinstance(event, Scored)]
    assert [event.steps for event in scored] == [1, 1]
    assert sum(event.computed for event in scored) == opened.mirror.tree.tokens
    assert sum(event.elapsed_s for event in scored) == opened.mirror.cost.elapsed_s


def test_a_block_is_scored_once_and_equal_steps_are_one_block(tmp_path: Path) -> None:
    opened = Opened(case("prm-mistral-tokens", tmp_path / "model").verifier)
    first, second = levels(depth=1)[0]
    second.text = f"  {first.text}"  # a process reward model reads steps without white space

    values = opened.judge([first, second]).values
    opened.judge([first])

    assert values[0] == values[1]
    assert [event.steps for event in opened.events if isinstance(event, Scored)] == [1, 0]
    assert len(opened.mirror.tree) == 2


def test_what_the_search_gives_up_is_freed(tmp_path: Path) -> None:
    opened = Opened(case("prm-mistral-tokens", tmp_path / "model").verifier)
    tree = levels()
    for level in tree:
        opened.judge(level)
    memory, mirror = opened.engine.load().memory, opened.mirror
    held = memory.used
    gone = [tree[0][0], *tree[0][0].children, *tree[0][0].children[0].children]
    own = sum(len(opened.engine.step_tokens(n.text, first=n.depth == 1)) for n in gone)

    mirror.forget(gone)

    assert memory.used == held - own
    mirror.forget(gone)  # again: nothing happens
    assert memory.used == held - own
    mirror.close()
    assert memory.used_by(mirror.tree) == 0
    assert not opened.engine.load().state.trees


def test_a_block_that_mirrors_two_stays_until_both_are_given_up(tmp_path: Path) -> None:
    opened = Opened(case("prm-mistral-tokens", tmp_path / "model").verifier)
    first, second = levels(depth=1)[0]
    second.text = first.text
    opened.judge([first, second])
    memory = opened.engine.load().memory
    held = memory.used

    opened.mirror.forget([first])
    assert memory.used == held
    opened.mirror.forget([second])
    assert memory.used < held


def test_a_step_without_tokens_is_its_parents_block(tmp_path: Path) -> None:
    made = case("orm-llama", tmp_path / "model")
    opened = Opened(made.verifier)
    first, second = levels(depth=1)[0]
    first.text = ""

    values = opened.judge([first, second]).values

    own = [made.score(tmp_path / "model", opened.ids(node)) for node in (first, second)]
    assert values == pytest.approx(own, abs=TOLERANCE)
    assert len(opened.mirror.tree) == 2


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


def test_qwen_prm_reads_what_its_model_card_shows(tmp_path: Path) -> None:
    made = case("qwen-prm", tmp_path / "model")

    text = text_of(made.verifier, "First, add.\n\n", "So 5.\n\n")

    assert text == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}."
        "<|im_end|>\n<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
        "First, add.<extra_0>So 5.<extra_0>"
    )


def test_trl_reads_a_line_break_after_each_step(tmp_path: Path) -> None:
    made = case("prm-mistral-tokens", tmp_path / "model")

    assert text_of(made.verifier, "Add.\n", "So 5.\n") == "What is 2+3?Add.\nSo 5.\n"


def test_an_outcome_reward_model_reads_the_chat_up_to_its_end(tmp_path: Path) -> None:
    made = case("orm-qwen2-chat", tmp_path / "model")

    text = text_of(made.verifier, "Add.\n", "So 5.")

    assert text == (
        "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\nAdd.\nSo 5.<|im_end|>\n"
    )


def test_parts_of_a_format_are_settings(tmp_path: Path) -> None:
    save(tmp_path, "AutoModelForCausalLM", "llama", byte_tokenizer())
    verifier = ProcessRewardModel(
        str(tmp_path),
        family="trl",
        head="tags",
        prompt="Q:\\s{problem}\\n",
        between="* ",
        separator=" ok?",
        good="y",
        bad="n",
    )

    opened = Opened(verifier)

    assert text_of(verifier, "one\n", "two\n") == "Q: What is 2+3?\none ok?* two ok?"
    [node, _] = levels(depth=1)[0]
    good, bad = (byte_tokenizer().encode(letter)[0] for letter in "yn")
    own = tag_score(good, bad)(tmp_path, opened.ids(node))
    assert opened.judge([node]).values == pytest.approx([own], abs=TOLERANCE)


def test_steps_have_the_tokens_of_the_whole_text_where_the_tokenizer_splits_there(
    tmp_path: Path,
) -> None:
    steps = ("Add. \n", "So 5.\n")
    for merges, same in (((), True), ((" +",), True), ((".\n",), False)):
        tokenizer = byte_tokenizer(merges=merges)
        save(tmp_path, "AutoModelForTokenClassification", "llama", tokenizer, num_labels=2)
        engine = RewardEngine(ProcessRewardModel(str(tmp_path)), Placement(device="cpu"))
        before, _ = engine.prefix(shape().task, PROBLEM)
        ids = before + engine.step_tokens(steps[0], first=True)
        ids += engine.step_tokens(steps[1], first=False)
        text = "What is 2+3?Add.\nSo 5.\n"

        assert engine.tokenizer.decode(ids) == text
        assert (ids == engine.tokenizer.encode(text)) == same


def test_no_space_is_put_before_the_parts_of_a_path(tmp_path: Path) -> None:
    mark = "\N{LOWER ONE EIGHTH BLOCK}"
    tokenizer = spaced_tokenizer(f"{mark}ки", f"{mark}+", f"{mark}-", f"{mark}Add")
    save(tmp_path, "AutoModelForCausalLM", "mistral", tokenizer, head_dim=8)
    engine = RewardEngine(ProcessRewardModel(str(tmp_path)), Placement(device="cpu"))
    before, _ = engine.prefix(shape().task, PROBLEM)

    ids = before + engine.step_tokens("Add.", first=True) + engine.step_tokens("So", first=False)

    tokens = engine.tokenizer.convert_ids_to_tokens(ids)
    spoken = f"{mark}What{mark}is{mark}2+3?{mark}Add.|{mark}ки|\nSo|{mark}ки"
    assert "".join(tokens) == spoken.replace("|", "")
    assert tokens.count(f"{mark}ки") == 2
    assert tokens[-1] == f"{mark}ки"
    assert ids == tokenizer.encode("What is 2+3? Add. ки\nSo ки")
    assert engine.encode(" +") == tokenizer.convert_tokens_to_ids([f"{mark}+"])


# Values


def test_one_label_is_a_logit_and_several_are_a_distribution() -> None:
    assert values_of(torch.tensor([[0.0], [2.0]]), None) == pytest.approx(
        [0.5, 1 / (1 + math.exp(-2))]
    )
    two = torch.tensor([[1.0, 3.0]])
    assert values_of(two, None) == pytest.approx([1 / (1 + math.exp(-2))])
    assert values_of(two, 0) == pytest.approx([1 / (1 + math.exp(2))])
    three = torch.log(torch.tensor([[0.2, 0.3, 0.5]]))
    assert values_of(three, 2) == pytest.approx([0.5])


def test_no_score_is_a_proof_and_none_is_undefined() -> None:
    assert values_of(torch.tensor([[99.0], [-99.0]]), None) == [CERTAIN, pytest.approx(0.0)]
    with pytest.raises(ModelError, match="not finite"):
        values_of(torch.tensor([[math.nan]]), None)


# Errors


def refused(verifier: RewardModel, search: SearchShape | None = None) -> ArborError:
    """The error of a plan."""
    with pytest.raises(ArborError) as caught:
        RewardEngine(verifier, Placement(device="cpu")).plan(search or shape())
    return caught.value


def test_a_model_without_a_score_head_is_not_a_reward_model(tmp_path: Path) -> None:
    save(tmp_path, "AutoModelForCausalLM", "llama", byte_tokenizer())

    error = refused(OutcomeRewardModel(str(tmp_path)))

    assert (error.code, error.exit_code) == ("reward-head", 5)
    assert "is not a reward model" in error.message and "head=tags" in error.hint


def test_the_vocabulary_needs_the_tag(tmp_path: Path) -> None:
    save(tmp_path, "AutoModelForCausalLM", "llama", byte_tokenizer())

    error = refused(ProcessRewardModel(str(tmp_path)))

    assert error.code == "reward-tags"
    assert "no token for the separator ' ки' (5 tokens)" in error.message
    assert "separator=…" in error.hint and "qwen-prm" in error.hint


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("+", "+", "the same token, '+'"),
        ("good", "-", "no token for the good 'good' (4 tokens)"),
        ("", "-", "needs a token for a good step"),
    ],
)
def test_tags_are_two_tokens(good: str, bad: str, words: str, tmp_path: Path) -> None:
    save(tmp_path, "AutoModelForCausalLM", "llama", byte_tokenizer())

    error = refused(
        ProcessRewardModel(
            str(tmp_path), family="trl", head="tags", separator="\n", good=good, bad=bad
        )
    )

    assert error.code == "reward-tags" and words in error.message


def test_a_separator_that_looks_special_must_be_one_token(tmp_path: Path) -> None:
    save(tmp_path, "AutoModelForTokenClassification", "llama", byte_tokenizer(), num_labels=2)

    error = refused(ProcessRewardModel(str(tmp_path), separator="<step>"))

    assert error.code == "reward-tags" and "'<step>' (6 tokens)" in error.message


def test_the_class_of_a_good_step_must_be_known(tmp_path: Path) -> None:
    save(tmp_path, "AutoModelForTokenClassification", "llama", byte_tokenizer(), num_labels=5)

    assert "5 labels" in refused(ProcessRewardModel(str(tmp_path))).message
    error = refused(ProcessRewardModel(str(tmp_path), label=5))
    assert error.code == "reward-head" and "label=0 to label=4" in error.hint
    RewardEngine(ProcessRewardModel(str(tmp_path), label=4), Placement(device="cpu")).plan(shape())


def test_other_score_heads_are_named(tmp_path: Path) -> None:
    folder = save_qwen_prm(tmp_path, byte_tokenizer("<extra_0>", chat=True))
    weights = load_file(folder / "model.safetensors")
    weights["score.4.weight"] = torch.zeros(2, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    error = refused(ProcessRewardModel(str(folder)))

    assert error.code == "reward-head" and "4.weight [2, 2]" in error.message


def test_weights_of_the_hub_that_cannot_be_had_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(
        tmp_path, "AutoModelForSequenceClassification", "llama", byte_tokenizer(), num_labels=1
    )
    hub = ModelLocation("some/model", "some/model")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    assert label_count(hub) == 1

    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match="some/model"):
        label_count(hub)


def test_a_score_head_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save(
        tmp_path, "AutoModelForSequenceClassification", "llama", byte_tokenizer(), num_labels=1
    )
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.zeros(1, 48)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(
        ModelError, match="reads 48 numbers of each token, and the decoder gives 32"
    ):
        RewardEngine(OutcomeRewardModel(str(folder)), Placement(device="cpu")).load()


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    folder = save_qwen_prm(tmp_path, byte_tokenizer("<extra_0>"))

    error = refused(ProcessRewardModel(str(folder)))

    assert error.code == "reward-chat" and "chat=off" in error.hint


def test_a_budget_below_one_path_names_the_smallest_and_it_works(tmp_path: Path) -> None:
    path = case("orm-llama", tmp_path / "model").verifier.model

    error = refused(OutcomeRewardModel(path, budget="40tok"))

    assert isinstance(error, BudgetInfeasible)
    assert f"budget={error.needed}tok of the verifier 'orm'" in error.hint
    Opened(OutcomeRewardModel(path, budget=f"{error.needed}tok"))


def test_a_longer_step_than_planned_is_explained(tmp_path: Path) -> None:
    path = case("orm-llama", tmp_path / "model").verifier.model
    search = shape(depth=1, tokens=8, blocks=1)
    engine = RewardEngine(OutcomeRewardModel(path), Placement(device="cpu"))
    enough = f"{engine.plan(search).enough_tokens}tok"
    opened = Opened(OutcomeRewardModel(path, budget=enough), search)
    [node, _] = levels(depth=1)[0]
    node.text = "x" * 60

    with pytest.raises(BudgetInfeasible, match="one path in the reward model") as caught:
        opened.judge([node])
    assert "of the verifier 'orm'" in caught.value.hint


def test_paths_beyond_the_context_are_refused(tmp_path: Path) -> None:
    folder = save(
        tmp_path, "AutoModelForSequenceClassification", "llama", byte_tokenizer(), num_labels=1,
        max_position_embeddings=128,
    )  # fmt: skip

    error = refused(OutcomeRewardModel(str(folder)))

    assert error.code == "problem-too-long" and "whose context is 128" in error.message
    opened = Opened(OutcomeRewardModel(str(folder)), shape(depth=1))
    [node, _] = levels(depth=1)[0]
    node.text = "x" * 150
    with pytest.raises(InputError, match="whose context is 128"):
        opened.judge([node])


def test_settings_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it must be auto, math-shepherd or qwen-prm or trl"):
        ProcessRewardModel("m", family="chat")
    with pytest.raises(UsageError, match="steps='best'"):
        ProcessRewardModel("m", steps="best")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="label=-1"):
        OutcomeRewardModel("m", label=-1)
    with pytest.raises(ArborError, match="budget"):
        OutcomeRewardModel("m", budget="lots")
    with pytest.raises(UsageError, match="needs a value for 'model'"):
        OutcomeRewardModel().own_model(Placement())
    with pytest.raises(ModelError, match="no such directory"):
        OutcomeRewardModel(str(tmp_path / "none")).own_model(Placement())
    with pytest.raises(UsageError, match="belongs to a Solver"):
        OutcomeRewardModel("m").verify(shape().task, PROBLEM, [], None)  # type: ignore[arg-type]


def test_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    folder = save(
        tmp_path, "AutoModelForSequenceClassification", "llama", byte_tokenizer(), num_labels=1
    )
    change_config(folder, is_causal=False)

    assert refused(OutcomeRewardModel(str(folder))).code == "arch-unsupported"
