"""TRL's GRPO on trees: its log probabilities and its advantages are those of the rollouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the extra `trl` is not installed")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import arbor
from arbor.errors import UsageError
from arbor.integrations.training.grpo import TreeGRPOTrainer, TreeRollouts
from arbor.run.rollout import Rollout

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's own dependencies

SAPLING = Path(arbor.__file__).parent / "sapling"
PUZZLES = ["4 5 6 10", "3 3 8 8"]
TREE = "eptree,chains=2,forks=2,width=1"
REASONING = {
    **{"task": "reasoning", "verifier": "self", "controller": "chain,samples=4"},
    **{"max_depth": 2, "step_tokens": 8},
}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a trainer whose groups have four completions."""
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")

    def make(
        model: Any = None,
        data: dict[str, list[Any]] | None = None,
        peft_config: Any = None,
        rollouts: TreeRollouts | dict[str, Any] | None = None,
        **config: Any,
    ) -> TreeGRPOTrainer:
        given = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 4,
            "num_generations": 4,
            "temperature": 0.8,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
        }
        if not isinstance(rollouts, TreeRollouts):
            settings = {"task": "game24", "controller": TREE, "verifier": "exact"}
            settings |= rollouts or {}
            rollouts = TreeRollouts(str(SAPLING), temperature=0.8, **settings)
        return TreeGRPOTrainer(
            model or AutoModelForCausalLM.from_pretrained(SAPLING, dtype=torch.float32),
            rollouts,
            args=GRPOConfig(**given | config),
            train_dataset=Dataset.from_dict(data or {"prompt": PUZZLES * 4}),
            processing_class=AutoTokenizer.from_pretrained(SAPLING),
            peft_config=peft_config,
        )

    return make


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a trainer makes of each batch, with the log probabilities of its own forward."""

    def listen(trainer: TreeGRPOTrainer) -> list[dict[str, Any]]:
        made = trainer._generate_and_score_completions
        outputs: list[dict[str, Any]] = []

        def score(inputs: list[dict[str, Any]]) -> dict[str, Any]:
            found = made(inputs)
            ids = torch.cat([found["prompt_ids"], found["completion_ids"]], 1)
            mask = torch.cat([found["prompt_mask"], found["completion_mask"]], 1)
            length = found["completion_ids"].shape[1]
            with torch.no_grad():
                own, _, _ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, mask, length
                )
            outputs.append(found | {"own": own, "inputs": [dict(each) for each in inputs]})
            return found

        monkeypatch.setattr(trainer, "_generate_and_score_completions", score)
        return outputs

    return listen


def apart(found: dict[str, Any]) -> float:
    """The largest difference of log probabilities, of the rollouts and of the trainer's forward."""
    drawn = found["completion_mask"].bool()
    assert found["sampling_per_token_logps"].shape == found["own"].shape
    return float((found["sampling_per_token_logps"] - found["own"])[drawn].abs().max())


def test_log_probabilities_are_those_of_the_trainers_forward_at_every_step(
    train: Any, scored: Any
) -> None:
    trainer = train()
    before = [each.detach().clone() for each in trainer.model.parameters()]
    outputs = scored(trainer)
    trainer.train()

    assert len(outputs) == 2
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters(), strict=True))
    for found in outputs:
        assert apart(found) < 1e-4
        for row, one in zip(found["advantages"], found["inputs"], strict=True):
            assert row[: len(one["advantages"])].tolist() == pytest.approx(one["advantages"])
            assert not row[len(one["advantages"]) :].any()
    assert any(found["advantages"].any() for found in outputs)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trees that a trainer's rollouts draw."""

    def listen(trainer: TreeGRPOTrainer) -> list[Rollout]:
        solver = trainer.rollout_func.solver
        made, trees = solver.rollouts, []

        def note(*problems: Any, **options: Any) -> Iterator[Rollout]:
            for tree in made(*problems, **options):
                trees.append(tree)
                yield tree

        monkeypatch.setattr(solver, "rollouts", note)
        return trees

    return listen


def test_adapters_are_merged_into_the_weights_that_draw(train: Any, scored: Any) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = train(peft_config=adapter)
    own = AutoModelForCausalLM.from_pretrained(SAPLING, dtype=torch.float32).state_dict()
    outputs = scored(trainer)

    trainer.train()

    assert len(outputs) == 2
    assert max(map(apart, outputs)) < 1e-4
    base = trainer.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    torch.testing.assert_close(base, own["model.layers.0.self_attn.q_proj.weight"])


def test_weights_are_those_of_the_moment_at_any_step(train: Any, scored: Any) -> None:
    first = train(max_steps=1)
    first.train()
    other = AutoModelForCausalLM.from_pretrained(SAPLING, dtype=torch.float32)
    for each in other.parameters():
        each.data.add_(torch.randn_like(each) * 0.01)
    trainer = train(other, rollouts=first.rollout_func, max_steps=1)
    outputs = scored(trainer)

    trainer.train()

    assert max(map(apart, outputs)) < 1e-4


def test_weights_are_given_again_only_where_they_differ(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train()
    solver, updates = trainer.rollout_func.solver, []
    update = solver.update_weights
    monkeypatch.setattr(solver, "update_weights", lambda new: (updates.append(0), update(new)))
    prompts = PUZZLES[:1] * 4

    trainer.rollout_func(prompts, trainer)
    trainer.rollout_func(prompts, trainer)
    assert len(updates) == 1
    next(trainer.model.parameters()).data[0, 0] += 0.5
    trainer.rollout_func(prompts, trainer)
    assert len(updates) == 2
    solver.close()
    trainer.rollout_func(prompts, trainer)
    assert len(updates) == 3


def test_no_two_trees_share_a_seed(train: Any, drawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = train()
    trees = drawn(trainer)
    trainer.rollout_func(PUZZLES[:1] * 4, trainer)
    trainer.rollout_func(PUZZLES[:1] * 8, trainer)  # at the same step
    monkeypatch.setattr(type(trainer.accelerator), "process_index", 1)
    trainer.rollout_func(PUZZLES[:1] * 4, trainer)

    assert len({tree.solution.seed for tree in trees}) == 4
    assert len({tuple(tree.tokens) for tree in trees}) == 4


def test_a_column_of_the_data_set_holds_answer_keys(train: Any, drawn: Any) -> None:
    questions = ["What is 2 + 2?", "What is 3 + 3?"]
    data = {"prompt": questions * 4, "expected": ["4", "6"] * 4}
    trainer = train(data=data, rollouts=REASONING, max_steps=1)
    trees = drawn(trainer)

    trainer.train()

    keys = {tree.problem.text: tree.problem.expected for tree in trees}
    assert keys.items() <= {*zip(questions, ("4", "6"), strict=True)} and keys
    assert all(bool(each.isfinite().all()) for each in trainer.model.parameters())


@pytest.mark.parametrize("more", [{}, {"expected": [4] * 4}], ids=["missing", "not a text"])
def test_a_problem_without_an_answer_key_is_refused(more: dict[str, Any], train: Any) -> None:
    data = {"prompt": ["What is 2 + 2?"] * 4}
    trainer = train(data=data | more, rollouts=REASONING)
    with pytest.raises(UsageError) as error:
        trainer.train()
    assert "expected" in f"{error.value.message} {error.value.hint}"


def test_another_reward_needs_no_answer_key(train: Any) -> None:
    trees = train(data={"prompt": ["What is 2 + 2?"] * 4}, rollouts=REASONING)
    trainer = GRPOTrainer(
        trees.model,
        lambda completions, **others: [float(len(each)) for each in completions],
        args=trees.args,
        train_dataset=trees.train_dataset,
        processing_class=trees.processing_class,
        rollout_func=trees.rollout_func,
    )

    trainer.train()

    assert all(bool(each.isfinite().all()) for each in trainer.model.parameters())


def test_a_completion_has_no_more_tokens_than_the_trainer_allows(train: Any, drawn: Any) -> None:
    trainer = train(max_completion_length=3)
    trees = drawn(trainer)
    found = trainer.rollout_func(PUZZLES[:1] * 4, trainer)
    assert [len(each) for each in found["completion_ids"]] == [3] * 4
    trainer.max_completion_length = None
    found = trainer.rollout_func(PUZZLES[:1] * 4, trainer)
    assert min(len(each) for each in found["completion_ids"]) > 3
    assert len(trees) == 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": 1.0}, "temperature=1.0"),
        ({"rollouts": {"controller": "chain,samples=3"}}, "num_generations=3"),
        ({"top_p": 0.9}, "top_p=1.0"),
        ({"top_k": 5}, "top_k=0"),
        ({"min_p": 0.1}, "min_p=None"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.0"),
        ({"generation_kwargs": {"typical_p": 0.9}}, "generation_kwargs=None"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs=None"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions=False"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
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
