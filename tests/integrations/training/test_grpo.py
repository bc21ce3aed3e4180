"""TRL's GRPO on trees: its log probabilities and its advantages are those of the rollouts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra `trl` is not installed")
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

import arbor
from arbor.errors import UsageError
from arbor.integrations.training.grpo import TreeGRPOTrainer, TreeRollouts

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's own dependencies

SAPLING = Path(arbor.__file__).parent / "sapling"
PUZZLES = ["4 5 6 10", "3 3 8 8"]
TREE = "eptree,chains=2,forks=2,width=1"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a trainer whose groups have four completions."""
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")

    def make(controller: str = TREE, temperature: float = 0.8, **config: Any) -> TreeGRPOTrainer:
        rollouts = TreeRollouts(
            str(SAPLING), task="game24", controller=controller, verifier="exact", temperature=0.8
        )
        given = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "temperature": temperature,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
        }
        return TreeGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(SAPLING, dtype=torch.float32),
            rollouts,
            args=GRPOConfig(**given | config),
            train_dataset=Dataset.from_dict({"prompt": PUZZLES * 4}),
            processing_class=AutoTokenizer.from_pretrained(SAPLING),
        )

    return make


def test_log_probabilities_are_those_of_the_trainers_forward_at_every_step(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train()
    before = [each.detach().clone() for each in trainer.model.parameters()]
    made = trainer._generate_and_score_completions
    outputs: list[dict[str, Any]] = []

    def scored(inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found = made(inputs)
        ids = torch.cat([found["prompt_ids"], found["completion_ids"]], 1)
        mask = torch.cat([found["prompt_mask"], found["completion_mask"]], 1)
        length = found["completion_ids"].shape[1]
        with torch.no_grad():
            own, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)
        outputs.append(found | {"own": own, "inputs": [dict(each) for each in inputs]})
        return found

    monkeypatch.setattr(trainer, "_generate_and_score_completions", scored)
    trainer.train()

    assert len(outputs) == 2
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters(), strict=True))
    for found in outputs:
        drawn = found["completion_mask"].bool()
        assert found["sampling_per_token_logps"].shape == found["own"].shape
        apart = (found["sampling_per_token_logps"] - found["own"])[drawn].abs().max()
        assert apart < 1e-4
        for row, one in zip(found["advantages"], found["inputs"], strict=True):
            assert row[: len(one["advantages"])].tolist() == pytest.approx(one["advantages"])
            assert not row[len(one["advantages"]) :].any()
    assert any(found["advantages"].any() for found in outputs)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": 1.0}, "temperature=1.0"),
        ({"controller": "chain,samples=3"}, "num_generations=3"),
    ],
)
def test_what_contradicts_the_trainer_is_refused(
    settings: dict[str, Any], named: str, train: Any
) -> None:
    with pytest.raises(UsageError) as error:
        train(**settings).train()
    assert error.value.code == "trl"
    assert named in (error.value.hint or "")


def test_a_divided_group_is_refused(train: Any) -> None:
    trainer = train()
    with pytest.raises(UsageError) as error:
        trainer.rollout_func([PUZZLES[0]] * 3, trainer)
    assert error.value.code == "trl"


def test_sampling_is_the_trainers() -> None:
    with pytest.raises(UsageError) as error:
        TreeRollouts(str(SAPLING), sampling={"top_k": 5})
    assert error.value.code == "trl"
