"""Stage 4: the engine against the model's own forward in float32, with and without room.

A tree grows greedily in bfloat16, once with room for all of its KV and once with room for little
more than a path. Its questions' logits, and every token that it chose, are compared with
transformers' forward of the whole path, by a float32 copy of the same weights. Where the logits
are off by more than `ERROR`, no speed is reported.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gpu_stages.engines import Variant, captured, make_engine, random_model, token
from gpu_stages.floors import LLAMA_8B, TINY
from gpu_stages.rows import Job, NotAvailable
from random_llama import fixed_length
from torch import Tensor

from arbor.engine.engine import Engine
from arbor.engine.operation import Growth
from arbor.events import Event, Forwarded, Rehydrated
from arbor.model.sampling_params import Sampling
from arbor.tree import Node, ThoughtTree

LAYERS = 4
ERROR = 0.03  # of a row of logits, relative to its length
GAP = 0.05  # by which the largest logit may exceed that of the chosen token, of the largest
PROMPT, BLOCK = 300, 24  # tokens
FAN = (3, 2)
QUESTION = (5, 6)


def run(job: Job) -> None:
    """Check every backend of the device, and graphs, each with a full and a small budget."""
    device = torch.device(job.device)
    ways = [("torch", False)]
    if not job.small:
        ways = [
            (name, graphs) for graphs in (True, False) for name in ("triton", "flashinfer")
        ] + ways
    shape = TINY if job.small else LLAMA_8B
    todo = [(name, graphs, budget) for name, graphs in ways for budget in ("full", "small")]
    exact = model = engine = None
    made: tuple[str, bool] | None = None
    while todo and job.left_s > 0:
        name, graphs, budget = todo.pop(0)
        about: dict[str, Any] = {"backend": name, "graphs": graphs, "budget": budget}
        with job.checking(label(name, graphs, budget), **about):
            if exact is None:
                model = random_model(shape, device, layers=min(LAYERS, shape.layers))
                exact = copy.deepcopy(model).float()
            if engine is None or made != (name, graphs):
                engine = None
                variant = Variant("on", graphs=graphs)
                engine = make_engine(copy.deepcopy(model), variant, name, policy="lru", debug=True)
                made = (name, graphs)
            slots = PROMPT + 4 * BLOCK if budget == "small" else 4096
            found = agreement(engine, exact, slots)
            if graphs and captured(engine) == 0:
                raise NotAvailable("no step was captured as a graph")
            job.row(label(name, graphs, budget), **about, **found)
    job.end([label(*each) for each in todo])


def label(name: str, graphs: bool, budget: str) -> str:
    """``triton, graphs, small budget``."""
    return f"{name}{', graphs' if graphs else ''}, {budget} budget"


def agreement(engine: Engine, exact: Any, slots: int) -> dict[str, Any]:
    """Grow a tree within a budget and compare it with a model's own forward."""
    events: list[Event] = []
    vocabulary = exact.config.vocab_size
    tree = ThoughtTree([token(place, vocabulary) for place in range(PROMPT)])
    engine.open(tree, slots, emit=events.append)
    engine.extend(tree.root)
    growth = Growth(1, Sampling(temperature=0), fixed_length(BLOCK))
    leaves = [tree.root]
    for fan in FAN:
        leaves = engine.grow([(leaf, fan) for leaf in leaves], growth)
    asked = engine.ask(leaves, [list(QUESTION)] * len(leaves))
    errors, gaps = [], []
    for leaf, logits in zip(leaves, asked, strict=True):
        right = own_logits(exact, leaf)
        errors.append(relative_error(logits, right[-1]))
        gaps.append(largest_gap(right, leaf))
    error, gap = float(np.max(errors)), float(np.max(gaps))  # NaN if any is
    peak = max(event.peak for event in events if isinstance(event, Forwarded))
    again = sum(
        count for event in events if isinstance(event, Rehydrated) for _, count in event.nodes
    )
    tried = tree.tokens <= slots or again > 0  # a budget that held everything shows nothing
    engine.close(tree)
    ok = error < ERROR and gap < GAP and peak <= slots and tried
    return {"error": error, "gap": gap, "recomputed": again, "over": peak > slots, "ok": ok}


@torch.inference_mode()
def own_logits(model: Any, leaf: Node) -> Tensor:
    """The model's logits after the prompt's end, each token of the path, and a question."""
    ids = [token for node in leaf.path for token in node.tokens] + list(QUESTION)
    kept = len(ids) - PROMPT + 1
    output = model(torch.tensor([ids], device=model.device), logits_to_keep=kept)
    return output.logits[0].float()


def relative_error(logits: Tensor, right: Tensor) -> float:
    """The length of the difference by that of what is right."""
    return float((logits.to(right.device) - right).norm() / right.norm())


def largest_gap(right: Tensor, leaf: Node) -> float:
    """How far the chosen tokens are from the best ones at worst: rounding decides near ties."""
    chosen = [token for node in leaf.path[1:] for token in node.tokens]
    rows = right[: len(chosen)]
    index = torch.tensor(chosen, device=rows.device)[:, None]
    return float(((rows.amax(-1) - rows.gather(1, index)[:, 0]) / rows.amax(-1).abs()).max())
