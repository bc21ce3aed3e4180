"""TRL's GRPO on trees: completions are finished paths of a tree, advantages those of its thoughts.

Written for TRL 1.16. Needs ``arbor-search[trl]``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import pad

from arbor.errors import UsageError
from arbor.model.sampling_params import Sampling
from arbor.run.limits import limited
from arbor.run.planning import parse_problem
from arbor.run.plugin_answers import checked_task
from arbor.run.request import Request
from arbor.run.rollout import Rollout
from arbor.solver import Solver
from arbor.support.setting import settings_of
from arbor.tasks.base import Problem

KEY = "expected"  # the column of a data set that holds answer keys
PROCESS_SEEDS = 1 << 32  # trees that one process of a run may draw

# What the trainer's arguments may be, where rollouts have no such thing.
OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "generation_kwargs": (None, {}),
    "chat_template_kwargs": (None, {}),
    "mask_truncated_completions": (False,),  # paths end where the task says, not in a token
}


class TreeRollouts:
    """A `rollout_func` of `GRPOTrainer`: the completions of a prompt are the finished paths of one
    tree.

    A prompt of the data set is a problem as the task reads it; the task writes what the model
    reads. Siblings are drawn independently, as baselines need it, and without cut-offs, which the
    trainer's own log probabilities would lack. A path has at most the trainer's
    `max_completion_length` tokens. Before a search the solver gets the trainer's weights, unless it
    has them; adapters of PEFT are merged for that, and separated again. No two trees of a run share
    a seed.

    Args:
        model: as in `Solver`; its weights are replaced.
        temperature: the trainer's.
        settings: others of `Solver`. The controller finishes as many paths as the trainer's
            `num_generations`, such as ``chain,samples=8`` or ``eptree,chains=4,forks=2,width=2``.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, temperature: float = 1.0, **settings: Any
    ) -> None:
        if "sampling" in settings:
            raise UsageError(
                "trl",
                "the sampling of rollouts is the trainer's: its temperature, and independent draws.",
                f"Leave out sampling={settings['sampling']!r:.60}, or give temperature=….",
            )
        sampling = Sampling(temperature=temperature, top_p=1.0, arithmetic=False)
        self.solver = Solver(model, sampling=sampling, **settings)
        self._boundary = self.solver.setup.boundary
        self._weights: object = None  # which ones the solver was given
        self._trees = 0  # drawn so far

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """What the trainer needs of each completion, and its ``reward`` and ``advantages``.

        Raises:
            UsageError: the trainer has another temperature, another number of completions, or a
                setting that rollouts lack; several processes divide the completions of a prompt;
                rewards are used, and a problem has no answer key.
        """
        count = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        self._check(prompts, trainer, count)
        problems = self._problems(prompts, trainer)[::count]
        self._limit(trainer.max_completion_length)
        self._update(trainer.accelerator.unwrap_model(trainer.model))
        process = PROCESS_SEEDS * trainer.accelerator.process_index
        seed = self.solver.seed + process + self._trees
        self._trees += len(problems)
        graded = isinstance(trainer, TreeGRPOTrainer) or tree_reward in trainer.reward_funcs
        found: list[dict[str, Any]] = []
        for tree in self.solver.rollouts(problems, seed=seed):
            if len(tree.leaves) != count:
                raise UsageError(
                    "trl",
                    f"the tree of {tree.problem.text!r:.60} has {len(tree.leaves)} finished paths, "
                    f"and the trainer wants {count} completions.",
                    f"Use controller='chain,samples={count}', or num_generations="
                    f"{len(tree.leaves)}.",
                )
            if graded and not math.isfinite(tree.rewards.sum()):
                raise UsageError(
                    "trl",
                    f"{tree.problem.text!r:.60} has no answer key, so its paths have no rewards.",
                    f"Use TreeGRPOTrainer, and a data set with keys as texts in '{KEY}'.",
                )
            found += completions_of(tree)
        return {name: [each[name] for each in found] for name in found[0]}

    def _check(self, prompts: Sequence[Any], trainer: GRPOTrainer, count: int) -> None:
        own = self.solver.sampling.temperature
        if trainer.temperature != own:
            raise UsageError(
                "trl",
                f"the trainer's temperature is {trainer.temperature}, that of the rollouts {own}.",
                f"Use TreeRollouts(…, temperature={trainer.temperature}).",
            )
        for name, values in OFF.items():
            given = getattr(trainer.args, name)
            if given not in values:
                raise UsageError(
                    "trl",
                    f"the trainer has {name}={given!r:.60}, which rollouts do not have.",
                    f"Use GRPOConfig(…, {name}={values[0]}).",
                )
        groups = [prompts[begin : begin + count] for begin in range(0, len(prompts), count)]
        if any(len(each) < count or any(one != each[0] for one in each) for each in groups):
            raise UsageError(
                "trl",
                f"this process has only some of the {count} completions of a prompt.",
                "Use a per_device_train_batch_size that num_generations divides.",
            )

    def _problems(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> list[Problem]:
        """The problem of each prompt, with the data set's answer key where it has one."""
        task = checked_task(self.solver.setup.task)
        keys = trainer.keys if isinstance(trainer, TreeGRPOTrainer) else None
        setting = settings_of(Request)[KEY]
        problems = []
        for prompt, key in zip(prompts, keys or [None] * len(prompts), strict=True):
            problem = parse_problem(task, prompt)
            if key is not None:
                problem = replace(problem, expected=setting.checked(key))
            problems.append(problem)
        return problems

    def _limit(self, tokens: int | None) -> None:
        """Let a path have so many tokens at most, and no more than before."""
        most = [each for each in (tokens, self._boundary.path_tokens) if each is not None]
        boundary = limited(self._boundary, path_tokens=min(most, default=None))
        self.solver.setup = replace(self.solver.setup, boundary=boundary)

    def _update(self, model: Any) -> None:
        """Give the solver the weights of a model, unless it has them."""
        held = self.solver.checkpoint.updated
        if held is not None and self._weights == (_contents(model), held):
            return
        with _merged(model) as weights:
            self.solver.update_weights(weights)
        self._weights = _contents(model), self.solver.checkpoint.updated


def _contents(model: torch.nn.Module) -> dict[str, int]:
    """The sum of the bits of each weight, which training changes."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: int(each.contiguous().view(words[each.element_size()]).sum(dtype=torch.int64))
        for name, each in model.state_dict().items()
    }


@contextmanager
def _merged(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of a model, by its own names; while it lasts, adapters are merged into them."""
    if not hasattr(model, "merge_adapter"):
        yield model.state_dict()
        return
    model.merge_adapter()
    try:
        yield {
            name.removeprefix("base_model.model.")
            .replace(".base_layer", "")
            .replace("modules_to_save.default.", ""): each
            for name, each in model.state_dict().items()
            if model.prefix not in name and "original_module" not in name
        }
    finally:
        model.unmerge_adapter()


def completions_of(tree: Rollout) -> list[dict[str, Any]]:
    """The finished paths of a tree as TRL's completions."""
    prompt = int(tree.starts[1])
    advantages = tree.advantages()[tree.blocks]
    found = []
    for leaf, reward in zip(tree.leaves, tree.rewards, strict=True):
        at = tree.path(int(leaf))[prompt:]
        found.append(
            {
                "prompt_ids": tree.tokens[:prompt].tolist(),
                "completion_ids": tree.tokens[at].tolist(),
                "logprobs": tree.drawn[at].tolist(),
                "env_mask": tree.sampled[at].astype(int).tolist(),
                "reward": float(reward),
                "advantages": advantages[at].tolist(),
            }
        )
    return found


def tree_reward(reward: list[float], **others: Any) -> list[float]:
    """A reward function of `GRPOTrainer`: what the task's grader gave each path."""
    return reward


class TreeGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with the advantages of thoughts (`Rollout.advantages`) in place of a group's.

    A column ``expected`` of the data set holds answer keys, as texts, for a task that finds none in
    the problem.

    Args:
        model: as in `GRPOTrainer`.
        rollouts: of the same model.
        arguments: others of `GRPOTrainer`; `reward_funcs` are only logged.
    """

    def __init__(self, model: Any, rollouts: TreeRollouts, **arguments: Any) -> None:
        arguments.setdefault("reward_funcs", tree_reward)
        super().__init__(model, rollout_func=rollouts, **arguments)
        self.keys: Sequence[str | None] | None = None  # of the prompts in progress

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.keys = [one.get(KEY) for one in inputs]
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.keys = None
        each = [torch.tensor(one["advantages"], dtype=torch.float32) for one in inputs]
        padded = pad(each, padding_value=0.0, pad_to_multiple_of=self.pad_to_multiple_of)
        output["advantages"] = padded.to(output["advantages"].device)
        return output
