"""The worst case of a plan is enough: within `--budget full` nothing leaves to make room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.slow_cases import every
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from arbor import Solver
from arbor.events import Event, Evicted, Forwarded
from arbor.model.loading import BUILTIN


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


@pytest.mark.parametrize(
    ("controller", "settings"),
    every(
        3,
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
    ),
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


@pytest.mark.parametrize("controller", ["chain", "tot,beam=2,width=2"])
@pytest.mark.parametrize(("part", "staging"), [(0.1, 128), (0.25, 16), (0.3, 64), (0.5, 16)])
def test_a_part_holds_the_staging_buffer_too(controller: str, part: float, staging: int) -> None:
    settings: dict[str, Any] = {"host": "8MiB", "staging": f"{staging}tok", "max_expansions": 4}
    with Solver(controller=controller, budget=part, **settings) as solver:
        metrics = solver.solve("4 5 6 10").metrics

    assert metrics.peak_tokens <= metrics.budget_tokens
