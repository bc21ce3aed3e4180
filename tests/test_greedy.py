"""Pretrained models: a greedy chain has the tokens of transformers' ``generate``, one by one.

Both read the same GGUF file, in float32, and continue the same prompts. Where two logits are nearer
than float32 rounding, either may be the larger one: such a place is shown, and the chains are
compared up to it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.greedy import BLOCK, NEAR, TOKENS, Transformers, greedy, solver_of
from support.real_data import rows

from arbor.run.planning import encode_prompt

FEW = 48  # tokens of a chain in the default run
QUESTIONS = (
    "A shop sells 7 boxes of 12 pens. How many pens are these?",
    "Name three animals that can swim.",
)


def ties(
    theirs: Transformers,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    tokens: int = TOKENS,
) -> list[str]:
    """Near ties at which chains part; any other difference fails."""
    found = []
    expected = theirs.greedy(prompts, tokens)
    for number, (prompt, own, other) in enumerate(zip(prompts, ours, expected, strict=True)):
        same = next((i for i in range(len(own)) if own[i : i + 1] != other[i : i + 1]), None)
        if same is None:
            # a block that would not fit into the limit is left out
            assert own[-1] == theirs.end or len(own) > tokens - BLOCK, f"chain {number} is cut"
            continue
        assert same < len(other), f"chain {number} goes on after its end token"
        gap = theirs.gap([*prompt, *own[:same]], own[same])
        place = f"chain {number}, token {same}: {own[same]}, not {other[same]}, {gap:.1e} below"
        assert gap < NEAR, place
        found.append(place)
    return found


@pytest.mark.timeout(600)
def test_chains_of_smollm2_are_those_of_transformers(loaded_once: None, smollm2: Path) -> None:
    with solver_of(smollm2) as solver:
        prompts = [encode_prompt(solver.tokenizer, question) for question in QUESTIONS]
        ours = greedy(solver, prompts, FEW)

    assert not ties(Transformers(smollm2), prompts, ours, FEW)
    assert all(len(set(chain)) > 20 for chain in ours), "chains that repeat one token show little"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["smollm2", "gemma", "qwen_small", "qwen"])
def test_chains_of_twenty_problems_are_those_of_transformers(
    name: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(name)
    questions = [row["question"] for row in rows("gsm8k-test.jsonl", 20)]
    theirs = Transformers(path)
    with solver_of(path) as solver:
        prompts = [encode_prompt(solver.tokenizer, each) for each in questions]
        if name != "smollm2":  # of which transformers does not know how it splits digits
            assert [theirs.prompt(each) for each in questions] == prompts
        ours = greedy(solver, prompts)
    del solver
    gc.collect()

    found = ties(theirs, prompts, ours)
    print(*found, sep="\n")
    assert len(found) <= 2, found
