"""SimilarPrompts: whether a prompt may go on from the KV of an earlier one that says the same."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.hooks import OtherPrompt
from arbor.engine.mode_names import SHARE_THRESHOLD
from arbor.errors import UsageError
from arbor.events import Compared, Listener
from arbor.memory import KVMemory
from arbor.memory.prefix_cache import Kept
from arbor.model.plan import Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.tree import ThoughtTree

ALPHA = 1.5  # how much later layers count; the paper's grid search over 0.5, 1.0, 1.5 and 2.0


def layer_weights(layers: int, alpha: float = ALPHA) -> Tensor:
    """w_l = exp(alpha l / L) / sum over l' of exp(alpha l' / L), l = 1 ... L; float64 [layers]."""
    depth = torch.arange(1, layers + 1, dtype=torch.float64) / layers
    return torch.softmax(alpha * depth, 0)


def similarity(branch: Tensor, root: Tensor, *, alpha: float = ALPHA) -> float:
    """sigma = sum over layers of w_l cos(h_branch^l, h_root^l), in [-1, 1].

    RKSC, arXiv 2606.09937, equation 2. The paper does not say which token's hidden state h is;
    arbor passes the mean over the tokens in which two texts differ. A state of zeros has cosine 0.

    Args:
        branch: [L, d], a hidden state per layer, first layer first.
        root: [L, d], likewise.
        alpha: how much later layers count; 0: all alike.

    Raises:
        UsageError: shapes that are not the same [L, d], with L and d at least 1.
    """
    if branch.shape != root.shape or branch.ndim != 2 or not branch.numel():
        raise UsageError(
            "similarity",
            f"states of shape {tuple(branch.shape)} and {tuple(root.shape)}.",
            "Both are [layers, hidden size].",
        )
    one, other = branch.double().cpu(), root.double().cpu()
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=1, eps=1e-30)
    return float((layer_weights(len(one), alpha) * cosine).sum())


PROBED = 0.25  # part of the layers that a comparison runs


class SimilarPrompts:
    """RKSC's semantic sharing (arXiv 2606.09937, section 2.2), for prompts of several problems.

    Templates of one question are prompts, and the KV of a prompt is where a search spends what
    sharing can save; siblings have been computed by the time they can be compared. A prompt that is
    similar enough to an earlier one, whose KV is still on the device, is replaced by it: the search
    reads the earlier prompt's tokens at their positions and never its own wording. That is a
    different function of the input, so it needs lossy mode.

    The paper compares hidden states that only the prefill it wants to save would give. Here a probe
    runs the first layers over the tokens in which the two prompts differ, after the KV they have in
    common, in slots of the budget; both means over these tokens are compared.

    Args:
        runner: the model.
        tokenizer: a Hugging Face tokenizer, for reports.
        threshold: the least similarity.
        probed: part of the layers that a comparison runs, two layers at least; the paper's is 1.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        threshold: float = SHARE_THRESHOLD,
        probed: float = PROBED,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._threshold = threshold
        count = runner.layer_count
        self._layers = min(count, max(2, math.ceil(probed * count)))

    def other(self, memory: KVMemory, tree: ThoughtTree, emit: Listener) -> OtherPrompt | None:
        """The earlier prompt where it is similar enough, see `PromptHook`."""
        found = self.compare(memory, tree)
        if found is None:
            return None
        compared, other = found
        emit(compared)
        return other if compared.shared else None

    def compare(self, memory: KVMemory, tree: ThoughtTree) -> tuple[Compared, OtherPrompt] | None:
        """Compare the prompt of a tree, of which nothing is on the device, with the kept one that
        has the most tokens in common with it; None where there is none, where it is equal, or where
        the probe has no room."""
        prompt = np.array(tree.root.tokens, np.int64)
        kept = memory.prefixes.nearest(prompt)
        if kept is None:
            return None
        begin, own_end, other_end = differing(prompt, kept.tokens)
        if begin == own_end == other_end:
            return None
        first = begin
        if own_end == begin or other_end == begin:  # one has nothing where the other has words
            first = max(0, begin - 1)
            if first == begin:
                own_end, other_end = own_end + 1, other_end + 1
        rows = own_end + other_end - 2 * first
        if rows > memory.free:
            return None
        began = time.perf_counter()
        own, other = self._states(
            memory, tree, kept, first, (prompt[first:own_end], kept.tokens[first:other_end])
        )
        found = similarity(own, other)
        tokens = tuple(kept.tokens.tolist())
        event = Compared(
            tokens=len(prompt),
            other_tokens=len(tokens),
            common=begin,
            text=self._tokenizer.decode(prompt[begin:own_end].tolist(), skip_special_tokens=False),
            ids=tokens[begin:other_end],
            similarity=found,
            threshold=self._threshold,
            shared=found >= self._threshold,
            layers=self._layers,
            rows=rows,
            elapsed_s=time.perf_counter() - began,
        )
        return event, OtherPrompt(tokens, begin)

    def _states(
        self,
        memory: KVMemory,
        tree: ThoughtTree,
        kept: Kept,
        first: int,
        spans: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> tuple[Tensor, Tensor]:
        """The mean hidden state of each span after the first tokens of a kept prompt, [layers, d]
        each."""
        places = np.arange(first, dtype=np.int32)
        context = (Piece("kept", kept.slots[:first], places),) if first else ()
        held = [np.empty(0, np.int32)]
        try:
            segments = []
            for span in spans:
                positions = np.arange(first, first + len(span))
                slots = memory.borrow(span.tolist(), tree.root, positions=positions)
                held.append(slots)
                segments.append(Segment(context, span.tolist(), positions, slots, slots, logits=1))
            layers = range(self._layers)
            result = self._runner.forward(
                plan_forward(segments), memory.pool, stop_after=layers[-1], hidden=list(layers)
            )
        except Exception:
            memory.free_borrowed(np.concatenate(held))
            raise
        memory.free_borrowed(np.concatenate(held))
        cut = len(spans[0])
        states = [result.hidden[layer].float() for layer in layers]
        one = [each[:cut].mean(0) for each in states]
        other = [each[cut:].mean(0) for each in states]
        return torch.stack(one), torch.stack(other)


def differing(one: NDArray[np.int64], other: NDArray[np.int64]) -> tuple[int, int, int]:
    """Where two prompts differ: tokens in common at the beginning, and where the rest that is in
    common at the end begins in each."""
    least = min(len(one), len(other))
    unlike = np.flatnonzero(one[:least] != other[:least])
    begin = int(unlike[0]) if len(unlike) else least
    left = least - begin
    behind = np.flatnonzero(one[::-1][:left] != other[::-1][:left])
    end = int(behind[0]) if len(behind) else left
    return begin, len(one) - end, len(other) - end
