"""Weights in blocks: those that `gguf.quants` defines, and rows independent of the batch."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from arbor.kernels.linear import blocks
from arbor.kernels.linear.blocks import (
    KINDS,
    BlockEmbedding,
    BlockLinear,
    BlockWeight,
    encode_q8_0,
    multiply,
)
from arbor.kernels.native import FILE, SETS, native_library, open_library, without_native

DTYPES = (torch.float32, torch.bfloat16)
HALVES = {  # where a block has its float16 numbers
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> BlockWeight:
    """Blocks of random bytes, with scales of the size that weights have."""
    random = np.random.default_rng(seed)
    numbers, size, _ = KINDS[kind]
    if kind in ("F32", "F16", "BF16"):
        weight = torch.from_numpy(random.standard_normal((outputs, inputs)))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return BlockWeight(weight.to(dtype).view(torch.uint8), kind, inputs)
    data = random.integers(0, 256, (outputs, inputs // numbers, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = random.standard_normal((outputs, inputs // numbers, 1)) * 0.02
        data[:, :, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return BlockWeight(torch.from_numpy(data).flatten(1), kind, inputs)


def defined(weight: BlockWeight) -> Tensor:
    """The weights by the package `gguf`, float32."""
    plain: dict[str, Any] = {"F32": np.float32, "F16": np.float16}
    data: Any = weight.data.numpy()
    if weight.kind in plain:
        found = data.view(plain[weight.kind]).astype(np.float32)
    else:
        found = quants.dequantize(data, GGMLQuantizationType[weight.kind])
    return torch.from_numpy(found).view(weight.outputs, weight.inputs)


def rounds_weights(kind: str) -> bool:
    """Whether weights are rounded to the dtype of a product: numbers that are no codes, where the
    CPU multiplies pairs of bfloat16."""
    library = native_library()
    pairs = library is not None and library.name in ("avx512_bf16", "amx")
    return pairs and kind in ("F32", "F16")


def group_of_x(kind: str) -> int:
    """Numbers of x that share a unit: 16 or, as bytes, those whose weights share a scale."""
    library = native_library()
    as_bytes = library is not None and library.name in ("neon_dot", "neon_bf16")
    return 32 if as_bytes and kind not in ("Q2_K", "Q3_K", "Q6_K") else 16


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_products_are_those_of_the_format(kind: str) -> None:
    weight = random_blocks(kind, 37, 768)
    exact = defined(weight)
    random = torch.Generator().manual_seed(1)
    ids = torch.tensor([[36, 0], [7, 7]])
    for dtype in DTYPES:
        assert torch.equal(weight.dense(dtype), exact.to(dtype))
        assert torch.equal(weight.rows(ids, dtype), exact.to(dtype)[ids])

        x = torch.randn(150, 768, generator=random).to(dtype)
        bias = torch.randn(37, generator=random)
        multiplied = exact.to(dtype) if rounds_weights(kind) else exact
        wanted = x.double() @ multiplied.double().T + bias.double()
        found = multiply(x, weight, bias)

        bound = 1e-5 if dtype == torch.float32 else 2**-8  # of the sums; of rounding the result
        scale = x.double().abs() @ multiplied.double().abs().T + bias.abs()
        error = (found.double() - wanted).abs()
        assert bool((error <= bound * (wanted.abs() if bound > 1e-4 else 0) + 1e-5 * scale).all())
        for rows in (1, 2, 6, 7, 31, 129):
            assert torch.equal(multiply(x[-rows:], weight, bias), found[-rows:])


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_wider_than_a_cache_have_the_bits_of_any_batch(kind: str, dtype: torch.dtype) -> None:
    weight = random_blocks(kind, 50, 5120 + (64 if kind == "Q5_0" else 0))
    exact = defined(weight)
    x = torch.randn(20, weight.inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = multiply(x, weight, None)
    error = (found.double() - x.double() @ exact.double().T).abs()
    bound = 2e-6 if dtype == torch.float32 else 2**-8
    assert bool((error <= bound * (x.double().abs() @ exact.double().abs().T)).all())
    for rows in range(1, 17):
        assert torch.equal(multiply(x[:rows], weight, None), found[:rows])


def test_rows_end_within_a_block() -> None:
    for kind in (kind for kind in KINDS if KINDS[kind][0] == 32):
        for inputs in (32, 288, 480, 576, 896):
            weight = random_blocks(kind, 70, inputs)
            exact = defined(weight).double()
            x = torch.randn(9, inputs, generator=torch.Generator().manual_seed(3)).bfloat16()
            found = multiply(x, weight, None)
            wanted = x.double() @ exact.T
            bound = 2**-8 * wanted.abs() + 1e-5 * (x.double().abs() @ exact.abs().T)
            assert bool(((found.double() - wanted).abs() <= bound).all()), kind

            for at in HALVES[kind]:  # a neighbour whose first numbers are not finite
                weight.data[40, at : at + 2] = torch.tensor([0, 0x7E])
            damaged = multiply(x, weight, None)
            others = torch.arange(70) != 40
            assert torch.equal(damaged[:, others], found[:, others]), (kind, inputs)
            assert bool(damaged[:, 40].isnan().all()), kind
            for rows in (1, 2, 8):
                assert torch.equal(
                    multiply(x[:rows], weight, None)[:, others], found[:rows, others]
                )


def test_numbers_of_any_size_meet_codes() -> None:
    for kind in (kind for kind in KINDS if kind not in ("F32", "F16", "BF16")):
        weight = random_blocks(kind, 19, 512)
        exact = defined(weight).double()
        random = torch.Generator().manual_seed(2)
        x = torch.randn(6, 512, generator=random) * 10 ** (
            torch.rand(6, 512, generator=random) * 8 - 4
        )
        x[1, 300], x[2, 5], x[3], x[4] = torch.inf, torch.nan, 0, 1e-38
        x = x.bfloat16()
        found = multiply(x, weight, None).double()

        size = group_of_x(kind)
        greatest = x.double().abs().unflatten(1, (-1, size)).amax(-1)
        weights = exact.abs().unflatten(1, (-1, size)).sum(-1)
        wanted = x.double() @ exact.T
        bound = 2**-8 * wanted.abs() + 2**-14 * greatest @ weights.T + 1e-30
        for row in (0, 4, 5):
            assert bool(((found - wanted).abs() <= bound)[row].all()), kind
        assert not bool(found[1:3].isfinite().any()), kind
        assert bool((found[3] == 0).all()), kind


@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_multiplies_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(shutil.copy(FILE, tmp_path)) if FILE.exists() else FILE  # one set for each file
    library, reason = open_library(own, name)
    if library is None:
        pytest.skip(reason)
    assert library.name == name
    for module in (blocks, sys.modules[__name__]):
        monkeypatch.setattr(module, "native_library", lambda: library)
    for kind in KINDS:
        test_weights_and_products_are_those_of_the_format(kind)
        for dtype in DTYPES:
            if kind in ("Q4_K", "Q6_K", "Q5_0"):
                test_rows_wider_than_a_cache_have_the_bits_of_any_batch(kind, dtype)
    test_numbers_of_any_size_meet_codes()
    test_rows_end_within_a_block()


@pytest.mark.skipif(native_library() is None, reason="the library is not built")
def test_a_file_that_is_open_keeps_its_instruction_set() -> None:
    library = native_library()
    assert library is not None
    weight, x = random_blocks("Q4_K", 70, 512), torch.randn(3, 512).bfloat16()
    wanted = multiply(x, weight, None)

    for name in SETS:
        found, reason = open_library(FILE, name)
        if name == library.name:
            assert found is not None
        elif "cannot run" not in reason:
            assert (found, reason.split(":")[0]) == (None, f"open with {library.name} already")
        assert torch.equal(multiply(x, weight, None), wanted)
    again, _ = open_library(FILE)
    assert again is not None and again.name == library.name


def test_without_the_kernels_torch_multiplies_by_the_same_weights() -> None:
    weight = random_blocks("Q4_K", 70, 512)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(1))
    found = multiply(x, weight, None)
    with without_native():
        plain = multiply(x, weight, None)
        assert torch.equal(multiply(x[:3], weight, None), plain[:3])
        assert torch.equal(weight.dense(torch.float32), defined(weight))
    assert float((plain - found).abs().max()) <= 1e-5 * float(found.abs().max())


@pytest.mark.parametrize(
    ("inputs", "row", "message"),
    [
        (768, 431, "takes rows of 432 bytes"),
        (512 + 32, 306, "are not whole blocks of 256"),
        (0, 0, "are not whole blocks"),
    ],
)
def test_rows_that_are_not_whole_blocks_are_refused(inputs: int, row: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockWeight(torch.zeros(4, row, dtype=torch.uint8), "Q4_K", inputs)


def test_rows_of_another_width_are_refused() -> None:
    weight = encode_q8_0(torch.ones(4, 64))
    for width in (32, 6400):
        with pytest.raises(RuntimeError):
            multiply(torch.ones(2, width), weight, None)


def test_rows_beyond_the_matrix_are_refused() -> None:
    weight = random_blocks("Q6_K", 5, 256)
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            weight.rows(torch.tensor([0, wrong]), torch.float32)


def test_layers_over_several_matrices_look_like_those_of_torch() -> None:
    parts = [random_blocks("Q4_0", 33, 64), random_blocks("Q8_0", 16, 64, seed=1)]
    bias = torch.randn(49)
    layer = BlockLinear(parts, bias, torch.float32)
    x = torch.randn(2, 3, 64)

    wanted = torch.nn.functional.linear(x, torch.cat([defined(each) for each in parts]), bias)
    assert torch.allclose(layer(x), wanted, atol=1e-4)
    assert layer.weight.shape == (49, 64)
    assert bool(layer.weight.isnan().all())
    assert not layer.state_dict()
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), layer(x))

    table = BlockEmbedding(parts[0], torch.bfloat16, scale=torch.tensor(8.0))
    ids = torch.tensor([[1, 32]])
    assert torch.equal(table(ids), defined(parts[0]).bfloat16()[ids] * torch.tensor(8.0).bfloat16())


def test_a_bias_with_gaps_is_read_as_it_is() -> None:
    weights = [random_blocks("Q8_0", outputs, 64) for outputs in (19, 13)]
    bias, x = torch.arange(64, dtype=torch.float32)[::2], torch.randn(3, 64)
    found = BlockLinear(weights, bias, torch.float32)(x)

    assert torch.equal(found, BlockLinear(weights, bias.clone(), torch.float32)(x))


def test_8_bits_change_a_weight_by_half_a_step_at_most() -> None:
    weight = torch.randn(20, 96) * torch.logspace(-4, 4, 20)[:, None]
    encoded = encode_q8_0(weight)
    scales = weight.unflatten(1, (-1, 32)).abs().amax(-1) / 127
    bound = (scales * (0.5 + 127 * 2**-11) + 2**-24 * 127)[..., None]  # and the scale's rounding
    error = (encoded.dense(torch.float32) - weight).unflatten(1, (-1, 32)).abs()
    assert bool((error <= bound).all())
    for wrong in (torch.nan, torch.inf, 1e30):
        with pytest.raises(ValueError, match="a weight is NaN, infinite or beyond"):
            encode_q8_0(torch.full((1, 32), wrong))
