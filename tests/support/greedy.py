"""Greedy continuations of one GGUF file by transformers and by arbor, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import torch

from arbor import Solver
from arbor.events import Boundary, Event
from arbor.tasks.plain_text import SteppedText, plain_problem

TOKENS = 128  # of a chain
BLOCK = 16  # most tokens of a block, which also ends with a line
NEAR = 1e-3  # logits that two orders of the same float32 sums may swap


class Transformers:
    """A GGUF file in transformers, in float32.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def model(self) -> Any:
        """Its weights; loaded when they are first used, since two copies may not fit."""
        from transformers import AutoModelForCausalLM

        # transformers reads the header twice, and maps all names for each of the model's parts
        pure = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
        with patch.multiple(gguf, **pure):
            return AutoModelForCausalLM.from_pretrained(
                self._path.parent, gguf_file=self._path.name, dtype=torch.float32
            ).eval()

    @property
    def end(self) -> int:
        """The token that ends a text."""
        return int(self.model.generation_config.eos_token_id)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that transformers makes of the file."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path.parent, gguf_file=self._path.name)

    def prompt(self, question: str) -> list[int]:
        """A question as a message where the file has a chat template, else as text."""
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer.encode(question))
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """`generate` of all prompts at once, each up to its end token, which is included."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(each)) + list(each) for each in prompts])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
        found = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=self.end
        )
        rows = [row[width:].tolist() for row in found]
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in rows]

    @torch.no_grad()
    def gap(self, before: Sequence[int], token: int) -> float:
        """How far the logit of a next token lies below the largest."""
        logits = self.model(torch.tensor([list(before)])).logits[0, -1]
        return float(logits.max() - logits[token])


def solver_of(path: Path, **settings: Any) -> Solver:
    """A solver of greedy chains that continue token ids in float32, block by block."""
    return Solver(
        path,
        task=SteppedText(max_tokens=BLOCK, max_depth=TOKENS // 2),
        controller="chain",
        verifier="exact",
        sampling={"temperature": 0},
        dtype="float32",
        threads=1,
        **settings,
    )


def greedy(
    solver: Solver, prompts: Sequence[Sequence[int]], tokens: int = TOKENS
) -> list[list[int]]:
    """Chains of a solver of `solver_of`, all at once: `tokens` of each, or up to its end token."""
    found: list[list[int]] = [[] for _ in prompts]

    def listen(place: int, event: Event) -> None:
        if isinstance(event, Boundary) and event.node:
            found[place] += event.ids

    jobs = [
        (plain_problem(ids, f"prompt {number}"), {"max_tokens": tokens})
        for number, ids in enumerate(prompts)
    ]
    list(solver.as_completed(jobs, concurrency=len(jobs), listen=listen))
    return [chain[:tokens] for chain in found]  # the limit counts on blocks of their mean length
