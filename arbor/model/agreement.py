"""Self-check of a loaded model: arbor's logits against the model's own, one small forward each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from arbor.errors import ModelError, logits_not_finite
from arbor.memory.pool import KVPool
from arbor.model.attention import IMPLEMENTATION
from arbor.model.plan import Segment, plan_forward
from arbor.model.runner import ModelRunner

LENGTH = 10
HEAD = 4  # tokens of the first path in the first of two forwards
TOLERANCE = 1e-3  # seen: 1e-6
HALF_TOLERANCE = 0.2  # of bfloat16 and float16; seen: 0.02 in three random layers


def paths(config: Any) -> list[list[int]]:
    """Two paths of `LENGTH` tokens, none of which is padding."""
    vocabulary = min(int(config.vocab_size), 1000)
    ids = [i for i in range(3, vocabulary) if i != getattr(config, "pad_token_id", None)]
    return [[ids[(at * 37 + i * 11) % len(ids)] for i in range(LENGTH)] for at in (0, 1)]


@torch.inference_mode()
def own_logits(model: Any) -> Tensor | None:
    """The model's own logits, [2 LENGTH, V] float32; None if its attention is arbor's already."""
    if model.config._attn_implementation == IMPLEMENTATION:
        return None
    model.eval()
    ids = torch.tensor(paths(model.config.get_text_config()), device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.flatten(0, 1).float()


def arbor_logits(runner: ModelRunner) -> Tensor:
    """The logits of arbor's forward for the same paths, [2 LENGTH, V].

    The first path runs in two parts, the second part together with the other path, so that the
    place of most rows in the batch is not their place on the path.
    """
    first, second = paths(runner.config)
    pool = KVPool(runner.layer_kv, 2 * LENGTH, runner.dtype, runner.device)
    slots = np.arange(2 * LENGTH, dtype=np.int32)

    def part(ids: list[int], start: int, end: int, at: int) -> Segment:
        own = slots[at : at + end]
        return Segment((), ids[start:end], np.arange(start, end), own, own[start:], end - start)

    head = runner.forward(plan_forward([part(first, 0, HEAD, 0)]), pool).logits
    rest = [part(first, HEAD, LENGTH, 0), part(second, 0, LENGTH, LENGTH)]
    return torch.cat([head, runner.forward(plan_forward(rest), pool).logits])


def logit_error(runner: ModelRunner, own: Tensor) -> float:
    """How far arbor's logits are from `own`, relative to their length, for the median token:
    rounding alone sends some tokens to other experts."""
    return float(((arbor_logits(runner) - own).norm(dim=-1) / own.norm(dim=-1)).median())


def check_agreement(runner: ModelRunner, own: Tensor) -> None:
    """Refuse a model with other logits under arbor, for example by a row's place in the batch.

    Args:
        own: `own_logits` of the model before arbor's attention.

    Raises:
        ModelError: the difference is more than rounding.
    """
    if not own.isfinite().all():
        raise logits_not_finite()
    error = logit_error(runner, own)
    half = runner.dtype in (torch.float16, torch.bfloat16)
    if not error <= (HALF_TOLERANCE if half else TOLERANCE):
        raise ModelError(
            "arch-unsupported",
            f"model_type '{runner.config.model_type}' computes something that arbor does not: its logits differ from "
            f"those of its own forward by {error:.2g} of their size, in the median of {len(own)} tokens.",
            "Take another model.",
            model_type=runner.config.model_type,
            error=error,
        )
