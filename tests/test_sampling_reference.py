"""Draws against the plain definition of sampling, and what they cost: transfers and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.plain_sampling import plain_sample
from support.slow_cases import drawn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arbor.engine import sampling as module
from arbor.engine.sampling import Draws, sample
from arbor.errors import ModelError
from arbor.kernels.native import without_native
from arbor.model.sampling_params import Sampling

ALMOST_ONE = 1 - 2.0**-53
SAMPLINGS = {
    "greedy": Sampling(0.0),
    "all": Sampling(1.0, 1.0),
    "top-p": Sampling(0.7, 0.9),
    "top-p, hot": Sampling(2.0, 0.99),
    "top-k": Sampling(0.7, 1.0, 40),
    "top-k above the prefix": Sampling(0.7, 1.0, 300),
    "top-k of most": Sampling(0.7, 1.0, 2500),
    "one": Sampling(1.0, 1.0, 1),
    "both": Sampling(0.5, 0.8, 7),
    "min-p": Sampling(0.7, 1.0, min_p=0.05),
    "low min-p": Sampling(2.0, 0.99, min_p=1e-5),
    "nearly all": Sampling(1.0, ALMOST_ONE),
    "so hot that probabilities are equal": Sampling(1e18, 0.9),
}
each_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


def random_rows(seed: int, rows: int, vocabulary: int, scale: float) -> Tensor:
    """Rows with a few probable tokens, which a nucleus of `_PREFIX` tokens nearly always covers."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    logits[:, :40] += 12 * torch.rand(rows, min(40, vocabulary), generator=generator)
    return logits


def random_numbers(seed: int, rows: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, dtype=torch.float64, generator=generator).tolist()


ROWS: dict[str, Callable[[int, int], Tensor]] = {
    "peaked": lambda seed, vocabulary: random_rows(seed, 4, vocabulary, 2.0),
    "flat": lambda seed, vocabulary: 0.01 * random_rows(seed, 4, vocabulary, 2.0),
    "many ties": lambda seed, vocabulary: random_rows(seed, 4, vocabulary, 3.0).bfloat16().float(),
    "two values": lambda seed, vocabulary: (random_rows(seed, 4, vocabulary, 1.0) > 0).float(),
    "all equal": lambda seed, vocabulary: torch.full((4, vocabulary), 1.5),
    "mostly -inf": lambda seed, vocabulary: random_rows(seed, 4, vocabulary, 2.0).index_fill(
        1, torch.arange(1 + vocabulary // 8, vocabulary), -torch.inf
    ),
    "one not -inf": lambda seed, vocabulary: torch.full((4, vocabulary), -torch.inf).index_fill(
        1, torch.tensor([vocabulary // 2]), 3.0
    ),
}


@pytest.mark.parametrize(
    ("sampling", "vocabulary", "rows"),
    drawn(SAMPLINGS.values(), [2, 50, 1024, 1025, 6000], ROWS, count=77),
)
def test_draws_are_those_of_the_plain_definition_in_every_bit(
    sampling: Sampling, vocabulary: int, rows: str
) -> None:
    logits = ROWS[rows](vocabulary, vocabulary)
    for uniforms in ([0.0, ALMOST_ONE, 0.5, 0.25], random_numbers(3, 4)):
        with without_native():
            drawn = sample(logits, uniforms, sampling)
        assert drawn == plain_sample(logits, uniforms, sampling)


@given(
    seed=st.integers(0, 10_000),
    uniform=st.floats(0, 1, exclude_max=True),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0.1, 5.0),
        top_p=st.floats(0.01, 1.0),
        top_k=st.integers(0, 400),
    ),
)
@example(seed=0, uniform=0.5, scale=1.0, sampling=Sampling(1.0, 1.0, 256))
def test_logits_of_16_bits_give_the_plain_draws_with_and_without_conversion(
    seed: int, uniform: float, scale: float, sampling: Sampling
) -> None:
    logits = random_rows(seed, 2, 1500, scale).bfloat16()

    with without_native():
        drawn = sample(logits, [uniform, 0.9], sampling)
        converted = sample(logits.float(), [uniform, 0.9], sampling)

    assert drawn == plain_sample(logits, [uniform, 0.9], sampling)
    assert drawn == converted


@each_sampling
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_drawn_alike_alone_and_among_others(
    sampling: Sampling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours decide neither a row's slice nor whether it needs more tokens."""
    logits = torch.cat([make(5, 3000) for make in ROWS.values()]).to(dtype)
    uniforms = random_numbers(8, len(logits))

    def draw_alone(row: int) -> Draws:
        return sample(logits[row : row + 1], uniforms[row : row + 1], sampling)

    with without_native():
        alone = [draw_alone(row) for row in range(len(logits))]
        for elements in (1, 5 * 3000, 2**20):
            monkeypatch.setattr(module, "_CPU_SLICE", elements)
            assert_rows_equal(sample(logits, uniforms, sampling), alone)
    alone = [draw_alone(row) for row in range(len(logits))]
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_rows_equal(sample(logits, uniforms, sampling), alone)
    torch.set_num_threads(before)


def assert_rows_equal(together: Draws, alone: list[Draws]) -> None:
    for name in (field.name for field in dataclasses.fields(Draws)):
        column = [getattr(each, name)[0] for each in alone]
        assert getattr(together, name) == column, name


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(), Sampling(1.0, 1.0, 5)])
def test_a_row_without_a_possible_token_is_refused(sampling: Sampling) -> None:
    logits = random_rows(1, 3, 2000, 1.0)
    logits[2] = -torch.inf

    with pytest.raises(ModelError, match="logits-not-finite"):
        sample(logits, [0.1, 0.2, 0.3], sampling)


# Memory


class Largest(TorchDispatchMode):
    """Most elements of one tensor that an operation created, by type; views of `given` excepted."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}
        self._given = given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() != self._given:
                seen = self.elements.get(each.dtype, 0)
                self.elements[each.dtype] = max(seen, each.numel())
        return made


@each_sampling
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_holds_the_vocabulary_of_all_rows(
    sampling: Sampling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocabulary = 24, 4000
    monkeypatch.setattr(module, "_CPU_SLICE", 3 * vocabulary + 1)
    logits = random_rows(2, rows, vocabulary, 1.0).to(dtype)

    with without_native(), Largest(logits) as largest:
        sample(logits, random_numbers(2, rows), sampling)

    assert max(largest.elements.values()) <= module._CPU_SLICE
    assert torch.float64 in largest.elements
