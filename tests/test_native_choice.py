"""Tokens chosen by the native kernels are those of the definition in float64, on every CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.slow_cases import drawn, only
from test_native import LEAST, needs_native
from test_sampling_reference import ALMOST_ONE, ROWS, SAMPLINGS, random_numbers, random_rows
from torch import Tensor

from arbor.engine.sampling import Draws, confidence, likeliest, likelihoods, sample
from arbor.kernels.fused.choice import logit_sums
from arbor.kernels.native import SETS, native_library, without_native
from arbor.model.sampling_params import Sampling

pytestmark = needs_native

LAST_BITS = 1e-11  # of a row's mass: what another order of sums of 6,000 numbers changes, and more


def kept(row: Tensor, sampling: Sampling) -> list[tuple[Tensor, Tensor]]:
    """By definition: ids in their order and weights of what may be drawn, for cut-offs that are
    passed by as little as sums may differ, on either side."""
    weight = torch.softmax(row.double() / sampling.temperature, dim=-1)
    ids = torch.arange(len(weight))
    if not sampling.cuts:
        return [(ids, weight)]
    weight, ids = weight.sort(descending=True, stable=True)
    weight = weight[: sampling.top_k or None]
    before = weight.cumsum(dim=-1) - weight
    found = []
    for slack in (-LAST_BITS, LAST_BITS):
        stays = torch.full_like(weight, True, dtype=torch.bool)
        if sampling.top_p < 1:
            total = float(weight.sum()) if sampling.top_k else 1.0
            stays &= before < sampling.top_p * total + slack
            stays[0] = True
        stays &= weight >= sampling.min_p * weight[0] * (1 - LAST_BITS)
        found.append((ids[: len(weight)][stays], weight[stays]))
    return found


def assert_drawn(logits: Tensor, uniforms: list[float], sampling: Sampling, draws: Draws) -> None:
    """Each row's number lies in its token's interval, at the place and in the length given."""
    for i, row in enumerate(logits):
        token = draws.tokens[i]
        logprobs = torch.log_softmax(row.double(), dim=-1)
        assert draws.logprob[i] == pytest.approx(float(logprobs[token]), abs=1e-6)
        assert draws.top1[i] == pytest.approx(float(logprobs.max().exp()), rel=1e-6)
        if sampling.temperature == 0:
            assert (token, draws.left[i], draws.share[i]) == (int(row.float().argmax()), 0.0, 1.0)
            continue
        assert 0 <= draws.left[i] < 1
        fits = []
        for ids, weight in kept(row, sampling):
            place = (ids == token).nonzero()
            if not len(place):
                continue
            mass = float(weight.sum())
            share = float(weight[place[0, 0]]) / mass
            begin = float(weight[: int(place[0, 0])].sum()) / mass
            number = begin + draws.left[i] * share
            close = number == pytest.approx(uniforms[i], abs=LAST_BITS * len(row))
            fits.append(close and draws.share[i] == pytest.approx(share, rel=1e-9))
        assert any(fits), (sampling, i, token)


@pytest.mark.parametrize("top_k", [2**31, 2**32 + 1, sys.maxsize])
def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it(top_k: int) -> None:
    logits = torch.tensor([[0.0, 0.1, 0.2, 0.3]]).expand(5, -1)
    uniforms = [0.05, 0.3, 0.5, 0.7, 0.95]

    found = sample(logits, uniforms, Sampling(temperature=1.0, top_k=top_k))

    assert found == sample(logits, uniforms, Sampling(temperature=1.0, top_k=4))
    assert found.tokens == [3, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("sampling", "vocabulary", "rows"),
    drawn(SAMPLINGS.values(), [2, 50, 1024, 1025, 6000], ROWS, count=77),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_those_of_the_definition(
    sampling: Sampling, vocabulary: int, rows: str, dtype: torch.dtype
) -> None:
    logits = ROWS[rows](vocabulary, vocabulary).to(dtype)
    for uniforms in ([0.0, ALMOST_ONE, 0.5, 0.25], random_numbers(3, 4)):
        assert_drawn(logits, uniforms, sampling, sample(logits, uniforms, sampling))


@given(
    seed=st.integers(0, 10_000),
    uniform=st.floats(0, 1, exclude_max=True),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0.1, 5.0),
        top_p=st.floats(0.01, 1.0),
        top_k=st.integers(0, 400),
        min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    ),
    vocabulary=st.sampled_from([40, 1500, 40_000]),
)
def test_any_row_and_sampling_gives_the_definitions_draw(
    seed: int, uniform: float, scale: float, sampling: Sampling, vocabulary: int
) -> None:
    logits = random_rows(seed, 2, vocabulary, scale)
    logits[0] = logits[0].bfloat16().float()  # many ties
    uniforms = [uniform, 0.9]
    assert_drawn(logits, uniforms, sampling, sample(logits, uniforms, sampling))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_rows_of_a_larger_tensor_are_read_where_they_lie(sampling: Sampling) -> None:
    logits = random_rows(1, 6, 3001, 2.0)
    uniforms = random_numbers(1, 3)

    assert sample(logits[::2, 1:], uniforms, sampling) == sample(
        logits[::2, 1:].contiguous(), uniforms, sampling
    )
    turned = logits[::2].t().contiguous().t()  # its rows are not: torch chooses
    assert sample(turned, uniforms, sampling).tokens == (
        sample(logits[::2], uniforms, sampling).tokens
    )
    assert sample(logits[:0], [], sampling).tokens == []


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocabulary", [2, 50, 6000])
def test_sums_of_logits_are_those_of_float64(rows: str, vocabulary: int) -> None:
    logits = ROWS[rows](1, vocabulary)
    sums = logit_sums(logits)
    assert sums is not None

    wide = logits.double()
    chances = torch.softmax(wide, -1)
    assert torch.equal(sums[0], wide.amax(-1))
    assert torch.allclose(sums[1], (wide - wide.amax(-1, keepdim=True)).exp().sum(-1), rtol=1e-13)
    assert torch.allclose(sums[2], torch.special.entr(chances).sum(-1), rtol=1e-12, atol=1e-12)
    assert torch.equal(sums[3], wide.argmax(-1).double())
    alone = [logit_sums(row) for row in logits.split(1)]
    assert torch.equal(torch.cat([each for each in alone if each is not None], 1), sums)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_sums_of_a_row_that_is_not_finite_are_nan(wrong: float) -> None:
    logits = random_rows(1, 3, 2000, 1.0)
    logits[1, 7 if wrong > -math.inf or wrong != wrong else slice(None)] = wrong

    sums = logit_sums(logits)

    assert sums is not None
    assert sums[1].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confidence_and_likelihoods_are_those_of_torch(dtype: torch.dtype) -> None:
    logits = torch.cat([make(4, 6000) for make in ROWS.values()])
    where, given = [0, 3, 3, 9], [5, 1, 5999, 17]

    found = confidence(logits), likelihoods(logits, where, given), likeliest(logits, 5)
    with without_native():
        wanted = confidence(logits), likelihoods(logits, where, given), likeliest(logits, 5)

    assert found[0] == pytest.approx(wanted[0], abs=1e-5)
    assert found[1][0] == pytest.approx(wanted[1][0], abs=1e-5)
    assert found[1][1] == wanted[1][1]
    for mine, theirs in zip(found[2], wanted[2], strict=True):
        assert [p for _, p in mine] == pytest.approx([p for _, p in theirs], abs=1e-5)


HERE = Path(__file__).parent


@pytest.mark.parametrize("name", only([LEAST], SETS))
def test_every_instruction_set_draws_alike(name: str) -> None:
    """Each in a process of its own, which reads the choice of the set when it starts."""
    library = native_library()
    assert library is not None
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from test_native_choice import draw_all
from arbor.kernels.native import native_library
print([] if native_library() is None else draw_all())
"""
    environment = {**os.environ, "ARBOR_NATIVE": name}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    found = eval(done.stdout)
    if not found:
        pytest.skip(f"this CPU has no {name}")
    for mine, theirs in zip(found, draw_all(), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], abs=1e-6)


def draw_all() -> list[tuple[list[int], list[float]]]:
    """Tokens, and the other numbers, of draws of every kind."""
    found = []
    for sampling in SAMPLINGS.values():
        for rows in ("peaked", "flat", "many ties", "mostly -inf"):
            logits = ROWS[rows](3, 5001)
            draws = sample(logits, random_numbers(5, len(logits)), sampling)
            numbers = (draws.logprob, draws.top1, draws.left, draws.share)
            found.append((draws.tokens, [each for column in numbers for each in column]))
    return found
