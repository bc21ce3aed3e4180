"""Weights of GGUF files in their blocks: those that transformers converts, and their logits."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import ARCHITECTURES, llama, write_gguf, write_random
from support.real_models import model_file
from support.slow_cases import drawn, every, only
from torch import Tensor, nn

from arbor import Solver
from arbor.errors import ArborError, ModelError
from arbor.kernels.linear.blocks import KINDS, BlockEmbedding, BlockLinear
from arbor.kernels.linear.experts import BlockExperts
from arbor.kernels.linear.layers import weight_bytes
from arbor.kernels.native import without_native
from arbor.model.gguf import weights
from arbor.model.gguf.header import read_gguf_header
from arbor.model.loading import _by_transformers, load_config, load_model, locate_model

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that convert

CPU = torch.device("cpu")
IN_BLOCKS = list(weights.ARCHITECTURES)
DTYPES = (torch.float32, torch.bfloat16)
CONVERTED = (IN_BLOCKS, (False, True), DTYPES)  # architectures, whether the head is tied, dtypes
LONG = 64  # tokens


def converted(path: Path, dtype: torch.dtype) -> Any:
    """The model as transformers converts it."""
    source = locate_model(path)
    model, missing, _ = _by_transformers(
        source, load_config(source), dtype, None, "AutoModelForCausalLM"
    )
    assert not missing
    return model


def numbers(model: Any, name: str, dtype: torch.dtype) -> Tensor:
    """A parameter of a model that may keep it in blocks."""
    path, _, key = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if isinstance(module, BlockLinear):
        bias = None if module.bias is None else module.bias.to(dtype)
        found = module.weights[0].dense(dtype) if key == "weight" else bias
        assert found is not None
        return found
    if isinstance(module, BlockEmbedding):
        return module.table.dense(dtype)
    if isinstance(module, BlockExperts):
        parts = [module.gate, module.up] if key == "gate_up_proj" else [module.down]
        dense = [torch.stack([each.dense(dtype) for each in part]) for part in parts]
        return torch.cat(dense, dim=1)
    found = getattr(module, key)
    assert isinstance(found, Tensor)
    return found


def logits(model: Any, count: int = 100) -> Tensor:
    # of so many tokens that an expert which rounding takes in place of another decides nothing
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, count), generator=random)
    with torch.inference_mode():
        found: Tensor = model(ids).logits[0].float()
    return found


@pytest.mark.parametrize(
    ("architecture", "tied", "dtype"),
    only(drawn(*CONVERTED), itertools.product(*CONVERTED)),
)
def test_weights_have_the_bits_of_transformers_conversion(
    architecture: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, architecture, ("Q4_K", "Q8_0", "Q6_K", "F16"), tied)
    wanted = converted(path, dtype)

    model = load_model(locate_model(path), dtype, CPU)

    for name, weight in wanted.state_dict().items():
        assert torch.equal(numbers(model, name, dtype), weight), name
    in_blocks = [each for each in model.modules() if isinstance(each, BlockLinear)]
    dense = [each for each in model.modules() if type(each) in (nn.Linear, nn.Embedding)]
    assert all(getattr(each, "out_features", 0) == 1 for each in dense), "one row is no matrix"
    assert in_blocks and model.dtype == dtype
    exact = logits(converted(path, torch.float32))
    ours, theirs = ((logits(each) - exact).norm() / exact.norm() for each in (model, wanted))
    assert ours < (1e-4 if dtype == torch.float32 else 1.2 * theirs)


def test_smollm3_is_read_though_transformers_does_not_convert_it(tmp_path: Path) -> None:
    """Every fourth of its layers has no rotary embedding."""
    model, path = llama("SmolLM3", layers=5), tmp_path / "m.gguf"
    write_gguf(model, path)

    with Solver(path, dtype="float32", controller="chain", max_expansions=1) as solver:
        found = load_model(solver.checkpoint.source, torch.float32, CPU)
        solver.solve("4 5 6 10")

    assert found.config.no_rope_layers == [1, 1, 1, 0, 1]
    assert torch.allclose(logits(found), logits(model), atol=1e-5)


@pytest.mark.parametrize("quantized", [False, True])
def test_biases_of_a_file_are_those_of_its_layers(quantized: bool, tmp_path: Path) -> None:
    model, path = llama(attention_bias=True, mlp_bias=True), tmp_path / "m.gguf"
    write_gguf(model, path, quantized)

    with Solver(path, dtype="float32", controller="chain", max_expansions=1) as solver:
        found = load_model(solver.checkpoint.source, torch.float32, CPU)
        solver.solve("4 5 6 10")  # its logits are compared with the model's own

    assert torch.allclose(logits(found), logits(model), atol=1e-2 if quantized else 1e-5)
    assert {name for name, _ in model.named_parameters() if name.endswith(".bias")} == {
        f"{name}.bias"
        for name, each in found.named_modules()
        if getattr(each, "bias", None) is not None
    }
    assert torch.equal(
        numbers(found, "model.layers.1.self_attn.k_proj.bias", torch.float32),
        model.model.layers[1].self_attn.k_proj.bias,
    )


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_scales_its_queries_by_the_width_of_a_head(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, architecture)

    model = load_model(locate_model(path), torch.float32, CPU)

    assert {layer.self_attn.scaling for layer in model.model.layers} == {32**-0.5}


@pytest.mark.parametrize("architecture", ["qwen2", "starcoder2"])
def test_a_tensor_that_the_model_does_not_take_is_refused_by_name(
    architecture: str, tmp_path: Path
) -> None:
    path, more = tmp_path / "m.gguf", "blk.1.attn_q_norm.weight"
    write_random(path, architecture, others={more: [1.0] * 64})

    with pytest.raises(ModelError) as refused:
        load_model(locate_model(path), torch.float32, CPU)

    assert refused.value.code == "model-gguf"
    assert f"'{more}'" in refused.value.message and architecture in refused.value.message


def test_settings_of_layers_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, settings={"llama.feed_forward_length": 2**31 - 1})
    wide = tmp_path / "wide.gguf"
    write_gguf(llama(), wide, settings={"llama.embedding_length": 2**30})

    for each in (path, wide):
        with pytest.raises(ModelError) as caught:
            load_model(locate_model(each), torch.float32, CPU)
        assert caught.value.code == "model-incomplete"
        assert "settings" in caught.value.message


@pytest.mark.parametrize("architecture", every(3, IN_BLOCKS))
def test_a_search_runs_over_the_blocks(architecture: str, tmp_path: Path) -> None:
    """Its logits are compared with the model's own when it is loaded."""
    path = tmp_path / "m.gguf"
    write_random(path, architecture, ("Q4_0", "Q5_K"))

    with Solver(path, controller="chain", verifier="exact", max_expansions=1) as solver:
        solver.solve("4 5 6 10")
        runner = solver.engine.runner
        described = solver.describe().weights_bytes

    header = read_gguf_header(path)
    assert abs(weight_bytes(runner.model) - described) < 0.05 * described
    assert sum(each.length for each in header.tensors) == pytest.approx(described, rel=0.05)


def test_threads_may_load_files_at_the_same_time(tmp_path: Path) -> None:
    """What builds a model without memory changes torch for all threads."""
    path = tmp_path / "m.gguf"
    write_random(path, "llama", ("Q4_0", "Q5_K"))
    together = threading.Barrier(3)

    def load(_: int) -> str:
        with Solver(path, controller="chain", verifier="exact", max_expansions=1) as solver:
            together.wait(30)
            return solver.solve("4 5 6 10").text

    with ThreadPoolExecutor(3) as threads:
        texts = set(threads.map(load, range(3)))

    assert len(texts) == 1
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16)])
def test_numbers_of_the_models_dtype_lie_in_the_file(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "qwen2", (kind,))

    model = load_model(locate_model(path), dtype, CPU)

    held = {each.data_ptr() for each in model.parameters() if each.dim() == 2}
    lines = [each.split() for each in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [
        tuple(int(end, 16) for end in each[0].split("-")) for each in lines if str(path) in each
    ]
    assert held and all(any(begin <= at < end for begin, end in mapped) for at in held)
    wanted = converted(path, dtype).state_dict()
    assert all(torch.equal(numbers(model, name, dtype), wanted[name]) for name in wanted)


def test_weights_are_dense_where_no_kernel_multiplies_blocks(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "gemma3", ("Q4_0",), tied=True)
    source = locate_model(path)

    with without_native():
        without = load_model(source, torch.float32, CPU)
        described = Solver(path, dtype="float32").describe()
    double = load_model(source, torch.float64, CPU)

    assert described.weights_bytes == 4 * described.parameters
    for model in (without, double):
        assert not [each for each in model.modules() if isinstance(each, BlockLinear)]
        wanted = converted(path, model.dtype).state_dict()
        assert all(torch.equal(numbers(model, name, model.dtype), wanted[name]) for name in wanted)


def test_what_shares_a_model_shares_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "llama", tied=True)
    model = load_model(locate_model(path), torch.float32, CPU)

    copied = copy.deepcopy(model)

    for mine, other in zip(model.modules(), copied.modules(), strict=True):
        if isinstance(mine, BlockLinear):
            assert mine.weights[0].data.data_ptr() == other.weights[0].data.data_ptr()
    assert model.lm_head.weights[0] is model.get_input_embeddings().table


def test_blocks_that_no_kernel_reads_become_dense_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "qwen2", ("IQ4_XS", "Q4_K"))
    assert "IQ4_XS" not in KINDS

    with caplog.at_level(logging.INFO):
        model = load_model(locate_model(path), torch.float32, CPU)

    kinds = {type(each).__name__ for each in model.modules() if hasattr(each, "in_features")}
    assert kinds == {"Linear", "BlockLinear"}
    assert "IQ4_XS are decoded to float32" in caplog.text
    wanted = converted(path, torch.float32).state_dict()
    assert all(torch.equal(numbers(model, name, torch.float32), wanted[name]) for name in wanted)


def test_other_architectures_are_converted_by_transformers_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "starcoder2")

    with caplog.at_level(logging.INFO):
        load_model(locate_model(path), torch.float32, CPU)

    assert "weights of 'starcoder2' become dense" in caplog.text
    assert set(ARCHITECTURES) - {"starcoder2"} == set(IN_BLOCKS)


def test_logits_of_single_tokens_are_those_of_the_head(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random(path, "llama", ("Q6_K",))

    with Solver(path, dtype="float32") as solver:
        solver.load()
        runner = solver.engine.runner
        state = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
        whole = runner.unembed(state, norm=False)
        some = runner.unembed(state, [7, 300], norm=False)

    assert torch.allclose(some, whole[:, [7, 300]], atol=1e-5)


# Damaged files


def changed(data: bytes, end: int, random: Any) -> bytes:
    """A file with some bytes of its header changed, or cut off."""
    found = bytearray(data)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(4, end))
        size = int(random.choice([1, 4, 8]))
        found[at : at + size] = random.bytes(size)
    if random.random() < 0.1:
        del found[int(random.integers(0, len(found))) :]
    return bytes(found)


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_damaged_files_are_refused_or_read_and_never_crash(count: int, tmp_path: Path) -> None:
    import numpy as np

    whole, path = tmp_path / "whole.gguf", tmp_path / "m.gguf"
    write_gguf(llama(), whole, quantized=True)
    data, end = whole.read_bytes(), read_gguf_header(whole).data_start
    random, refused = np.random.default_rng(count), 0
    for _ in range(count):
        path.write_bytes(changed(data, end, random))
        try:
            logits(load_model(locate_model(path), torch.float32, CPU), 3)
        except ArborError as error:
            assert error.code in ("model-incomplete", "model-gguf", "model-not-found"), error
            refused += 1
    assert 0 < refused < count


# Models that others trained


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen-small", "gemma"])
def test_a_real_model_has_the_logits_of_its_conversion(name: str) -> None:
    path = model_file(name)
    model, wanted = (
        each(path, torch.float32)
        for each in (lambda place, dtype: load_model(locate_model(place), dtype, CPU), converted)
    )

    ours, theirs = logits(model, LONG), logits(wanted, LONG)

    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    for own_name, weight in wanted.state_dict().items():
        assert torch.equal(numbers(model, own_name, torch.float32), weight), own_name
