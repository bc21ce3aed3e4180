"""Engines over small models, and the branching trees that tests grow with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.models import Words, path_logits
from support.policies import POLICIES
from torch import Tensor

from arbor.engine.engine import Engine
from arbor.engine.hooks import PromptHook
from arbor.engine.mode import Mode, Rehydrate, Share
from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import TokenSource
from arbor.events import Event, Forwarded, Listener
from arbor.kernels.attention.base import AttentionBackend
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.memory.prompt_files import PromptFiles
from arbor.memory.stores import NO_ROOM, LowerRoom
from arbor.model.fetch_costs import FetchCosts
from arbor.model.graphs import Recorder
from arbor.model.level_rule import LevelRule
from arbor.model.runner import ModelRunner
from arbor.model.sampling_params import Sampling
from arbor.retention.policy import Policy
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, ThoughtTree

PROMPT = (5, 17, 40, 8, 77, 23, 61, 5, 90, 33, 12, 50)
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.0, top_p=0.95)
LENGTH = 5
QUESTIONS = ((7, 8, 9), (11,))


class Lab(Engine):
    """An engine that keeps its events, with short-hands for growing.

    Args:
        model: switched to arbor's attention in place.

    Attributes:
        events: what happened.
        listener: of the next tree that is opened; by default what keeps the events.
    """

    def __init__(
        self,
        model: Any,
        backend: AttentionBackend | None = None,
        *,
        policy: str | Policy = "lru",
        mode: Mode = "lossless",
        rehydrate: Rehydrate = "selective",
        share: Share = "exact",
        prompt_hook: PromptHook | None = None,
        source: TokenSource | None = None,
        min_saved_reads: int = 0,
        debug: bool = False,
        recorder: Recorder | None = None,
        lower: LowerRoom = NO_ROOM,
        costs: FetchCosts | None = None,
        prompts: PromptFiles | None = None,
        deterministic: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.listener: Listener = self.events.append
        super().__init__(
            ModelRunner(model, backend or TorchCascade(), recorder, deterministic=deterministic),
            Words(),
            policy=POLICIES[policy] if isinstance(policy, str) else policy,
            mode=mode,
            rehydrate=rehydrate,
            share=share,
            prompt_hook=prompt_hook,
            source=source,
            levels=LevelRule(min_saved_reads),
            lower=lower,
            costs=costs,
            prompts=prompts,
            debug=debug,
        )

    def open(self, tree: ThoughtTree, slots: int, *, alone: bool = True, **run: Any) -> None:
        """`Engine.open` with `listener`, after the trees that are open have been closed."""
        if alone and self._opened is not None:
            for other in list(self.state.trees):
                self.close(other)
        super().open(tree, slots, **{"emit": self.listener} | run)

    def plant(
        self,
        slots: int = 4096,
        prompt: Sequence[int] = PROMPT,
        interrupted: Callable[[], bool] = bool,
    ) -> ThoughtTree:
        """Open a new tree and run its prompt."""
        tree = ThoughtTree(prompt)
        self.open(tree, slots, interrupted=interrupted)
        self.extend(tree.root)
        return tree

    def sprout(
        self,
        leaves: Sequence[tuple[Node, int]],
        sampling: Sampling = SAMPLED,
        length: int = LENGTH,
        seed: int = 3,
    ) -> list[Node]:
        """`grow` with blocks of `length` tokens."""
        stop = StopRule(Words(), BlockLimits((), length, 8), ())
        return self.grow(leaves, Growth(seed, sampling, stop))

    def rows(self) -> int:
        """Rows run so far."""
        return sum(event.rows for event in self.events if isinstance(event, Forwarded))


def grown(lab: Lab, slots: int = 4096) -> tuple[ThoughtTree, Tensor]:
    """A tree of 10 blocks, 3 levels deep, sampled and greedy, and its leaves' answers, [2 n, V].

    Each leaf answers two questions. The branches are visited out of order, so that under a small
    budget every path is dropped and comes back.
    """
    tree = lab.plant(slots)
    first, second, third = lab.sprout([(tree.root, 3)])
    pair = lab.sprout([(third, 1), (first, 2)], GREEDY)[1:]
    lab.sprout([(pair[1], 2), (second, 1)])
    ends = leaves_of(tree)
    nodes = [leaf for leaf in ends for _ in QUESTIONS]
    return tree, lab.ask(nodes, list(QUESTIONS) * len(ends))


def planted_again(model: Any, tree: ThoughtTree) -> Lab:
    """A lab that holds the KV of the same blocks, computed path by path under full retention."""
    again = ThoughtTree(tree.root.tokens)
    for node in tree.nodes[1:]:
        assert node.parent is not None
        child = again.fork(again[node.parent.id])
        for token in node.tokens:
            again.append(child, token)
        child.state = node.state
    lab = Lab(model)
    lab.open(again, 4096)
    for leaf in leaves_of(again):
        lab.extend(leaf)
    return lab


def is_greedy(node: Node) -> bool:
    """Whether `grown` decoded the block greedily."""
    return node.depth == 2 and node.key[0] != 1


def leaves_of(tree: ThoughtTree) -> list[Node]:
    return [node for node in tree if not node.children]


def path_ids(node: Node) -> list[int]:
    """Every token from the root to the block's end."""
    return [token for block in node.path for token in block.tokens]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest wanted number."""
    return float((got - want).abs().max() / want.abs().max())


def own_logits(model: Any, tree: ThoughtTree) -> dict[int, Tensor]:
    """Block -> logits of its tokens and the next one, [len + 1, V]; all positions of the root.

    By Hugging Face's own forward of each whole path.
    """
    logits: dict[int, Tensor] = {}
    for leaf in leaves_of(tree):
        whole = path_logits(model, path_ids(leaf))
        for node in leaf.path:
            logits[node.id] = whole[max(0, node.start - 1) : node.end]
    return logits


def own_answers(model: Any, tree: ThoughtTree) -> Tensor:
    """What `grown` asks, by Hugging Face's own forward."""
    return torch.stack(
        [
            path_logits(model, [*path_ids(leaf), *question])[-1]
            for leaf in leaves_of(tree)
            for question in QUESTIONS
        ]
    )
