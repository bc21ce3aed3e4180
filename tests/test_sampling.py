"""One uniform number per token decides it, whatever else runs."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Words, build
from support.trees import Lab, own_logits
from torch import Tensor

from arbor.engine import sampling as sampler
from arbor.engine.sampling import ArithmeticCode, likeliest, likelihoods, sample, stream
from arbor.engine.stop_rule import StopRule
from arbor.errors import ModelError
from arbor.kernels.fused import choice
from arbor.kernels.native import without_native
from arbor.model.sampling_params import Sampling
from arbor.tasks.base import BlockLimits
from arbor.tree import ThoughtTree

ALMOST_ONE = 1 - 2.0**-53
EVERYTHING = Sampling(temperature=1.0, top_p=1.0)


def logits_of(seed: int, rows: int, vocabulary: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * scale


def allowed(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """By definition: the tokens that may be drawn from one row, with their probabilities, most
    probable first."""
    probability = torch.softmax(logits.double() / sampling.temperature, -1).tolist()
    order = sorted(range(len(probability)), key=lambda token: -probability[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(probability[token] for token in order)
    kept: dict[int, float] = {}
    for token in order:
        if kept and sum(kept.values()) >= sampling.top_p * total:
            break
        if probability[token] < sampling.min_p * max(probability):
            break
        kept[token] = probability[token]
    mass = sum(kept.values())
    return {token: p / mass for token, p in kept.items()}


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(0, 12),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)


@given(sampling=samplings, seed=st.integers(0, 50), vocabulary=st.sampled_from([3, 10, 40]))
def test_the_cuts_keep_what_their_definitions_say(
    sampling: Sampling, seed: int, vocabulary: int
) -> None:
    logits = logits_of(seed, 1, vocabulary)
    grid = [(i + 0.5) / 2000 for i in range(2000)]

    drawn = sample(logits.expand(2000, -1), grid, sampling).tokens

    want = allowed(logits[0], sampling)
    counts = {token: drawn.count(token) for token in set(drawn)}
    assert set(counts) <= set(want)
    for token, probability in want.items():
        assert counts.get(token, 0) == pytest.approx(2000 * probability, abs=1.01)


@pytest.mark.parametrize(
    "sampling",
    [
        EVERYTHING,
        Sampling(0.7, 0.9),
        Sampling(1.3, 1.0, 20),
        Sampling(0.5, 0.8, 7),
        Sampling(1, 1, min_p=0.1),
    ],
    ids=["all", "top-p", "top-k", "both", "min-p"],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = logits_of(4, 1, 50)
    uniforms = np.random.default_rng(11).random(20_000).tolist()

    drawn = sample(logits.expand(20_000, -1), uniforms, sampling).tokens

    want = allowed(logits[0], sampling)
    counts = np.array([drawn.count(token) for token in want])
    expected = np.array(list(want.values())) * 20_000
    assert counts.sum() == 20_000
    big = expected >= 5
    chi2 = float((((counts - expected) ** 2) / expected)[big].sum())
    freedom = int(big.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocabulary", [5, 300, 3000])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("sampling", [EVERYTHING, Sampling(1.0, 0.9), Sampling(1.0, 0.9, 4)])
def test_a_uniform_at_either_end_gives_a_token_of_the_distribution(
    vocabulary: int, scale: float, sampling: Sampling
) -> None:
    logits = logits_of(2, 1, vocabulary, scale)
    logits[0, -1] = -torch.inf
    want = allowed(logits[0], sampling)

    tokens = sample(logits.expand(2, -1), [0.0, ALMOST_ONE], sampling).tokens

    probability = torch.softmax(logits[0].double(), -1)
    assert all(probability[token] > 0 for token in tokens)
    if scale:
        assert set(tokens) <= set(want)
    if sampling is EVERYTHING:
        assert tokens == [0, vocabulary - 2]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(0.7, 0.9), id="top-p"),
        pytest.param(Sampling(0.7, 1.0, 40), id="top-k"),
        pytest.param(Sampling(0.7, 0.8, 300), id="both"),
        pytest.param(Sampling(1.0, 0.98), id="wide"),
        pytest.param(Sampling(1.0, 1.0, min_p=0.05), id="min-p"),
        pytest.param(Sampling(1.0, 1.0, min_p=1e-4), id="low min-p"),
    ],
)
@given(seed=st.integers(0, 10_000), uniform=st.floats(0, 1, exclude_max=True))
def test_equally_probable_tokens_are_drawn_alike_in_any_batch(
    sampling: Sampling, seed: int, uniform: float
) -> None:
    """Logits of 16 bits lie on a grid, where many are equal."""
    row = logits_of(seed, 1, 4096, 3.0)[0]
    row[:40] += 12
    row = row.to(torch.bfloat16).float()

    alone = sample(row[None], [uniform], sampling)
    batched = sample(torch.stack([row, torch.zeros(4096)]), [uniform, uniform], sampling)

    assert batched.tokens[0] == alone.tokens[0]
    assert (batched.left[0], batched.share[0]) == (alone.left[0], alone.share[0])
    want = allowed(row, sampling)
    reached = np.cumsum(list(want.values()))
    place = list(want).index(alone.tokens[0])
    assert reached[place] > uniform - 1e-9
    assert place == 0 or reached[place - 1] <= uniform + 1e-9


@pytest.mark.parametrize("equal", [200, 256, 257, 3000])
@pytest.mark.parametrize("sampling", [Sampling(1.0, 0.9), Sampling(1.0, 1.0, 256)])
def test_of_tokens_equally_probable_at_the_edge_the_first_ones_stay(
    equal: int, sampling: Sampling
) -> None:
    logits = torch.full((1, 3000), -9.0)
    logits[0, -equal:] = 0.0
    grid = [(i + 0.5) / 500 for i in range(500)]

    drawn = sample(logits.expand(500, -1), grid, sampling).tokens

    assert drawn == sorted(drawn, key=lambda token: (-float(logits[0, token]), token))
    assert set(drawn) <= set(allowed(logits[0], sampling))


@pytest.mark.parametrize("native", [True, False])
def test_the_largest_logit_is_the_most_probable_whatever_rounding_makes_equal(native: bool) -> None:
    logits = torch.full((1, 8), -1e-7)
    logits[0, 4] = 0.0

    with contextlib.nullcontext() if native else without_native():
        assert sample(logits, [0.5], Sampling(temperature=0.0)).tokens == [4]
        assert likelihoods(logits, [0, 0], [0, 4])[1] == [False, True]
        assert likeliest(logits, 1)[0][0][0] == 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0), EVERYTHING, Sampling(1.0, 1.0, 5)])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(sampling: Sampling, wrong: float) -> None:
    logits = logits_of(1, 3, 2000)
    logits[1, 7] = wrong

    with pytest.raises(ModelError, match=r"logits-not-finite.*bfloat16"):
        sample(logits, [0.3] * 3, sampling)


# Streams


def test_a_stream_belongs_to_the_seed_and_the_blocks_place_in_the_tree() -> None:
    tree = ThoughtTree([1])
    first, second = tree.fork(tree.root), tree.fork(tree.root)
    late = ThoughtTree([9, 9])
    late.fork(late.root)
    late_second = late.fork(late.root)
    tree.fork(first)

    numbers = stream(7, second).random(4).tolist()

    assert numbers == stream(7, late_second).random(4).tolist()
    others = [
        stream(8, second),
        stream(7, first),
        stream(7, tree.root),
        stream(7, first.children[0]),
    ]
    assert all(other.random(4).tolist() != numbers for other in others)


def test_with_a_code_the_blocks_own_number_decides_every_token() -> None:
    own, lab = build("llama"), Lab(build("llama"))
    tree = lab.plant()

    children = lab.sprout([(tree.root, 3)], EVERYTHING, length=6, seed=5)

    for child in children:
        code = ArithmeticCode(5, child, EVERYTHING)
        for logits, token in zip(own_logits(own, tree)[child.id], child.tokens, strict=False):
            drawn = sample(logits[None], [code.number], EVERYTHING)
            assert drawn.tokens == [token]
            code.narrow(drawn.left[0], drawn.share[0])


# Arithmetic sampling


@pytest.mark.parametrize("index", [0, 3])
def test_a_child_alone_follows_the_models_distribution(index: int) -> None:
    """Texts of three tokens, the second and third depending on the one before."""
    logits = logits_of(9, 4, 4, 1.0)
    probability = torch.softmax(logits.double(), -1)
    draws = 4000
    tree = ThoughtTree([1])
    child = [tree.fork(tree.root) for _ in range(index + 1)][index]
    codes = [ArithmeticCode(seed, child, EVERYTHING) for seed in range(draws)]
    texts = [[0] for _ in range(draws)]
    for _ in range(3):
        rows = torch.stack([logits[text[-1]] for text in texts])
        drawn = sample(rows, [code.number for code in codes], EVERYTHING)
        for i, code in enumerate(codes):
            texts[i].append(drawn.tokens[i])
            code.narrow(drawn.left[i], drawn.share[i])

    chi2 = 0.0
    for a in range(4):
        for b in range(4):
            for c in range(4):
                expected = draws * float(probability[0, a] * probability[a, b] * probability[b, c])
                chi2 += (texts.count([0, a, b, c]) - expected) ** 2 / expected
    assert chi2 < 63 + 4 * math.sqrt(2 * 63)


# Boundaries


class Letters(Words):
    """A tokenizer of pieces of text."""

    pieces = ("a", "b", "\n", "\n\n", "c.", " d", "x\ny", "E", "ND", "")

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self.pieces[i] for i in ids)


def rule(*stops: str, most: int = 99, eos: tuple[int, ...] = ()) -> StopRule:
    return StopRule(Letters(), BlockLimits(stops, most, 3), eos)


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    stops=st.lists(st.sampled_from(["\n\n", "a\nb", "END", ". ", "b"]), max_size=2, unique=True),
)
def test_a_block_ends_with_the_token_that_completes_a_stop(
    tokens: list[int], stops: list[str]
) -> None:
    stop_rule = rule(*stops)
    text = Letters().decode

    for end in range(1, len(tokens) + 1):
        now, before = text(tokens[:end]), text(tokens[: end - 1])
        complete = any(stop in now for stop in stops)
        if any(stop in before for stop in stops):
            break
        assert (stop_rule.after(tokens[:end]) == "step") == complete


# The kernel of the sums


def test_sums_of_another_kernel_are_compared_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(logits: Tensor, temperature: float) -> Tensor:
        sums = choice.sums_by_torch(logits, temperature)
        sums[2] *= 1 + 1e-9
        return sums

    assert choice.agrees(choice.sums_by_torch, torch.device("cpu"))
    assert not choice.agrees(wrong, torch.device("cpu"))

    def failing(logits: Tensor, temperature: float) -> Tensor:
        raise ImportError("no compiler\nat all")

    for kernel, used, reasons in (
        (choice.sums_by_torch, True, []),
        (wrong, False, ["its sums are not torch's"]),
        (failing, False, ["ImportError: no compiler"]),
    ):
        caplog.clear()
        module = types.SimpleNamespace(row_sums=kernel)
        monkeypatch.setattr(choice, "triton_module", lambda name, what, module=module: module)
        choice._kernel.cache_clear()
        assert (choice._kernel(torch.device("cpu")) is not None) == used
        said = [f"the kernel for sums of logits is not used: {reason}" for reason in reasons]
        assert caplog.messages == said
    choice._kernel.cache_clear()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 1.0), Sampling(1.3, 0.95, 40)])
def test_draws_from_sums_are_those_from_softmaxes(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(40, 2000, generator=generator)
    uniforms = torch.rand(40, generator=generator).double().tolist()
    without = sample(logits, uniforms, sampling, sampler.drawn)

    monkeypatch.setattr(sampler, "row_sums", choice.sums_by_torch)
    found = sample(logits, uniforms, sampling, sampler.drawn)

    assert found.tokens == without.tokens
    for name in ("logprob", "top1", "left", "share"):
        assert getattr(found, name) == pytest.approx(getattr(without, name), rel=1e-5, abs=1e-5)
    logits[3, 7] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        sample(logits, uniforms, sampling, sampler.drawn)
