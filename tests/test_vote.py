"""The vote between states against shares computed by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.models import ARCHITECTURES, config_of
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InTurn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from arbor import Solver
from arbor.errors import BudgetInfeasible, InputError
from arbor.tree import Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")


def states(*texts: str) -> list[Node]:
    """Children of a root, one for each text."""
    tree = ThoughtTree([0])
    found = []
    for text in texts:
        node = tree.fork(tree.root)
        node.text, node.state = text, NodeState.CLOSED
        found.append(node)
    return found


NUMBERED = {"name": "reasoning", "yes": " 1", "no": " 2", "shots": 0}
# how these cut a text before their merges: a space joins letters, and not digits
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3 = QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def of_bytes(pattern: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that cuts texts so first, and has a token for a space and a digit."""
    vocabulary = {sign: place for place, sign in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [("\u0120", digit) for digit in "123456789"]
    for space, digit in merges:
        vocabulary[space + digit] = len(vocabulary)
    rules = Tokenizer(BPE(vocabulary, merges))
    joined = ByteLevel(add_prefix_space=False, use_regex=False)
    rules.pre_tokenizer = InTurn([Split(Regex(pattern), "isolated"), joined])
    rules.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=rules)


def sized(name: str, tokenizer: Any) -> Any:
    """A random model of an architecture with a vocabulary for the tokenizer."""
    model_type, settings = ARCHITECTURES[name]
    config = config_of(model_type, **settings | {"vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("pattern", "separate"), [(QWEN_2, True), (LLAMA_3, True), (GPT_2, False)], ids="qlg"
)
@pytest.mark.parametrize("verifier", ["vote", "self"])
def test_models_whose_digits_are_tokens_of_their_own_vote(
    pattern: str, separate: bool, verifier: str
) -> None:
    tokenizer = of_bytes(pattern)
    assert (tokenizer.tokenize("is 1") == ["i", "s", "\u0120", "1"]) is separate
    settings: dict[str, Any] = {
        "task": NUMBERED,
        "controller": {"name": "tot", "beam": 2, "width": 3},
        "verifier": verifier,
        "max_depth": 1,
        "step_tokens": 4,
        "tokenizer": tokenizer,
    }
    with Solver(sized("llama", tokenizer), **settings) as solver:
        smallest = solver.plan("1+1?").enough_tokens
        metrics = solver.solve("1+1?", budget=f"{smallest}tok").metrics

    assert metrics.asked > 0
    assert metrics.peak_tokens <= smallest


def test_a_search_by_votes_is_the_same_in_the_smallest_budget() -> None:
    settings: dict[str, Any] = {
        "controller": {"name": "tot", "beam": 2, "width": 3},
        "verifier": {"name": "vote", "choices": 3},
        "max_depth": 2,
    }
    with Solver(**settings) as solver:
        smallest = solver.plan("4 5 6 10").enough_tokens
        whole = solver.solve("4 5 6 10")
        small = solver.solve("4 5 6 10", budget=f"{smallest}tok")

    values = [(block.text, block.value) for block in whole.replay().blocks.values()]
    again = [(block.text, block.value) for block in small.replay().blocks.values()]
    assert [text for text, _ in values] == [text for text, _ in again]
    assert [value for _, value in values] == pytest.approx([value for _, value in again], abs=1e-4)
    assert whole.metrics.asked > 0
    assert small.metrics.peak_tokens <= smallest < whole.metrics.full_tokens


def test_the_first_vote_is_planned_for_first_thoughts_and_a_lever_for_the_longest() -> None:
    """Five choices of 20 tokens each, and later of 60; a context that has no room for long ones."""
    limits: Any = {"verifier": "vote", "controller": "chain,samples=2", "step_tokens": 20}
    solver = Solver(task=NUMBERED, max_depth=3, **limits)
    plan = solver.plan("4 5 6 10")
    first = plan.question_tokens - 5 * 40
    assert plan.smallest_tokens == plan.prompt_tokens + 20 + first
    assert plan.enough_tokens == plan.prompt_tokens + 60 + plan.question_tokens
    assert solver.plan("4 5 6 10", budget=f"{plan.smallest_tokens}tok")
    with pytest.raises(BudgetInfeasible, match=rf"prompt \+ 20 \+ {first} question"):
        solver.plan("4 5 6 10", budget=f"{plan.smallest_tokens - 1}tok")
    with pytest.raises(BudgetInfeasible, match=r"prompt \+ 10 \+"):
        Solver(task=NUMBERED, path_tokens=10, **limits).plan("4 5 6 10", budget="20tok")

    def named(**changed: int) -> list[int]:
        with pytest.raises(InputError) as caught:
            Solver(task=NUMBERED, **{**limits, **changed}).plan("4 5 6 10")
        return [int(each) for each in re.findall(r"--[a-z-]+ (\d+)", caught.value.hint)]

    depth, step = named(max_depth=40, path_tokens=10**6)
    (path,) = named(max_depth=40, path_tokens=400)
    works: list[Any] = [
        {"max_depth": depth, "path_tokens": 10**6},
        {"max_depth": 40, "path_tokens": 10**6, "step_tokens": step},
        {"max_depth": 40, "path_tokens": path},
    ]
    for changed in works:
        assert Solver(task=NUMBERED, **{**limits, **changed}).plan("4 5 6 10")
    assert named(max_depth=depth + 1, path_tokens=10**6)
    assert named(max_depth=40, path_tokens=path + 1)
