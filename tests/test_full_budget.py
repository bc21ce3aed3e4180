"""The worst case of a plan is enough: within `--budget full` nothing leaves to make room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import build
from support.trees import LENGTH, PROMPT, QUESTIONS, Lab
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from arbor import Solver
from arbor.engine.mode import Mode
from arbor.events import Event, Evicted, Forwarded
from arbor.measure.replay import Recording, replay
from arbor.model.loading import BUILTIN
from arbor.tree import ThoughtTree

LEAVES = 8
WHOLE = len(PROMPT) + LEAVES * LENGTH  # tokens of a tree with so many leaves


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that no text stops, so that every block is as long as the plan says."""
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN["sapling"])
    path = tmp_path_factory.mktemp("models") / "talker"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def gone(events: list[Event]) -> list[Evicted]:
    """What left, other than the KV of blocks that the search gave up."""
    return [event for event in events if isinstance(event, Evicted) and event.cause != "close"]


def peak(events: list[Event]) -> int:
    return max(event.peak for event in events if isinstance(event, Forwarded))


def asked_at_once(lab: Lab, slots: int, most: int | None) -> list[Evicted]:
    """What left while every leaf of a tree was asked the same question."""
    tree = ThoughtTree(PROMPT)
    lab.open(tree, slots, most=most)
    lab.extend(tree.root)
    leaves = lab.sprout([(tree.root, LEAVES)])
    lab.ask(leaves, [QUESTIONS[0]] * LEAVES)
    return gone(lab.events)


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
def test_questions_wait_for_one_another_where_nothing_has_to_leave(mode: Mode) -> None:
    full = WHOLE + len(QUESTIONS[0])
    for slots, most, leaves in ((full, full, False), (full, None, True), (full, full + 1, True)):
        lab = Lab(build("llama"), mode=mode, share="off", debug=True)
        assert bool(asked_at_once(lab, slots, most)) == leaves
        assert peak(lab.events) <= slots


def test_questions_share_a_forward_where_there_is_room_for_them() -> None:
    def forwards(slots: int) -> int:
        lab = Lab(build("llama"), share="off", debug=True)
        assert not asked_at_once(lab, slots, WHOLE + len(QUESTIONS[0]))
        return sum(isinstance(each, Forwarded) and each.kind == "verify" for each in lab.events)

    one = len(QUESTIONS[0])
    assert forwards(WHOLE + one) == LEAVES
    assert forwards(WHOLE + LEAVES // 2 * one) == 2
    assert forwards(WHOLE + LEAVES * one) == 1


@pytest.mark.parametrize(
    ("controller", "settings"),
    [
        ("tot,beam=3,width=4", {}),
        ("tot,beam=3,width=4", {"mode": "lossy", "policy": "streaming"}),
        ("tot,beam=3,width=4", {"staging": "16tok", "host": "1000tok"}),
        ("tot,beam=3,width=4", {"policy": "full"}),
        ("tot,beam=2,width=3,generate=propose", {}),
        ("mcts,simulations=6", {}),
        ("ab-mcts,thoughts=24", {}),
        ("best-of-n", {}),
        ("rebase", {"share": "off"}),
    ],
    ids=str,
)
def test_nothing_leaves_for_questions_within_the_full_budget(
    talker: Path, controller: str, settings: dict[str, Any]
) -> None:
    events: list[Event] = []
    task, problem = "reasoning", "What is 3 plus 4?"
    if "propose" in controller:
        task, problem = "game24", "4 5 6 10"
    shape: Any = {"step_tokens": 8, "max_depth": 4, "budget": "full", "verifier": "self"}
    shape |= {"controller": controller} | settings
    with Solver(str(talker), task=task, listeners=[events.append], **shape) as solver:
        plan = solver.plan(problem)
        solver.solve(problem)

    assert not gone(events)
    assert peak(events) <= plan.full_tokens


def test_searches_side_by_side_in_their_full_budgets_lose_nothing(talker: Path) -> None:
    events: list[Event] = []
    shape: Any = {"step_tokens": 8, "max_depth": 4, "budget": "full", "verifier": "self"}
    shape |= {"controller": "tot,beam=3,width=4", "task": "reasoning"}
    with Solver(str(talker), listeners=[events.append], **shape) as solver:
        problems = ["What is 3 plus 4?", "What is 3 plus 5?", "Is 7 a prime number?"]
        assert len(solver.solve_batch(problems)) == len(problems)

    assert not gone(events)


def test_a_replay_in_the_full_budget_loses_nothing_either(talker: Path) -> None:
    recorded: list[Event] = []
    again: list[Event] = []
    shape: Any = {"step_tokens": 8, "max_depth": 3, "budget": "full", "verifier": "self"}
    shape |= {"controller": "tot,beam=3,width=4", "task": "reasoning"}
    with Solver(str(talker), listeners=[recorded.append], **shape) as solver:
        full = solver.plan("What is 3 plus 4?").full_tokens
        solver.solve("What is 3 plus 4?")

    tokenizer = AutoTokenizer.from_pretrained(talker)
    replay(Recording.of(recorded), tokenizer, policy="reentry", slots=full, listen=again.append)

    assert not gone(again)
    assert peak(again) == peak(recorded)
