"""The FlashInfer backend against a stand-in for the package and its planner's arithmetic."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support import flashinfer_standin as standin
from support import tree_standin
from support.flashinfer_standin import Events, Wrapper
from support.models import build
from torch import Tensor

from arbor import Solver
from arbor.errors import OutOfMemory, UsageError
from arbor.kernels.attention import flashinfer_cascade
from arbor.kernels.attention.base import AttentionShape, CascadeLayout
from arbor.kernels.attention.flashinfer_cascade import (
    FlashInferCascade,
)
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.attention.trial import BackendUnusable
from arbor.kernels.attention.triton_tree import TritonTree
from arbor.model import loading, weights
from arbor.model.checkpoint import Checkpoint
from arbor.model.plan import Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner

SLOTS = 96
ACCELERATE = "transformers.utils.import_utils.is_accelerate_available"
CPU = torch.device("cpu")
SHAPE = AttentionShape(8, 2, 64, 64, 64**-0.5)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Events]:
    return standin.install(monkeypatch)


@pytest.fixture
def package(installed: tuple[Any, Events]) -> Any:
    """The stand-in, installed."""
    return installed[0]


@pytest.fixture
def backend(package: Any) -> FlashInferCascade:
    return FlashInferCascade(CPU)


def inputs(rows: int, shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values."""
    torch.manual_seed(rows)
    q = torch.randn(rows, shape.num_qo_heads, shape.head_dim_qk, dtype=torch.bfloat16)
    k = torch.randn(SLOTS + 1, shape.num_kv_heads, shape.head_dim_qk, dtype=torch.bfloat16)
    v = torch.randn(SLOTS + 1, shape.num_kv_heads, shape.head_dim_vo, dtype=torch.bfloat16)
    return q, k, v


def compare(backend: Any, layout: CascadeLayout, shape: AttentionShape) -> None:
    """One run, held to the reference."""
    given = inputs(layout.rows, shape)
    reference = RowwiseAttention()

    out, lse = backend.run(backend.plan(layout, shape), *given)

    right, right_lse = reference.run(reference.plan(layout, shape), *given)
    torch.testing.assert_close(out.float(), right.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, right_lse, atol=2e-2, rtol=1e-2)


def tree_of_segments() -> list[Segment]:
    """A root of 20 tokens, two blocks of 6, two decoding leaves below each, a hole of 3 rows."""
    slots = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
    root = Piece("root", slots[:20], np.arange(20, dtype=np.int32))
    blocks = [
        Piece(f"b{i}", slots[20 + 6 * i : 26 + 6 * i], np.arange(20, 26, dtype=np.int32))
        for i in range(2)
    ]
    segments = []
    free = 40
    for block in blocks:
        for length in (1, 4):
            own = slots[free : free + length]
            free += length
            segments.append(
                Segment((root, block), [1], np.array([25 + length]), own, own[-1:], logits=1)
            )
    own = slots[free : free + 3]
    segments.append(Segment((root,), [1, 2, 3], np.arange(20, 23), own, own, logits=1))
    return segments


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("sinks", [False, True])
def test_planned_levels_give_the_reference_attention(
    backend: FlashInferCascade, softcap: float | None, window: int | None, sinks: bool
) -> None:
    shape = replace(SHAPE, window=window, softcap=softcap)
    plan = plan_forward(tree_of_segments())
    layout = plan.layout(window)
    given = inputs(plan.rows, shape)
    logits = torch.randn(8) if sinks else None
    reference = RowwiseAttention()

    out, lse = backend.run(backend.plan(layout, shape), *given, logits)

    right, right_lse = reference.run(reference.plan(layout, shape), *given, logits)
    torch.testing.assert_close(out.float(), right.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, right_lse, atol=2e-2, rtol=1e-2)


# Planning


def test_a_level_whose_plan_failed_is_planned_again(
    backend: FlashInferCascade, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = plan_forward(tree_of_segments()).layout(None)
    backend.plan(layout, SHAPE)
    other = plan_forward(tree_of_segments()[:2]).layout(None)
    with monkeypatch.context() as patch:
        patch.setattr(Wrapper, "plan", lambda self, *args, **settings: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backend.plan(other, SHAPE)

    compare(backend, layout, SHAPE)


# Results


# Workspace

# Trying kernels before they are used


class MissingJITCacheError(RuntimeError):
    """As FlashInfer raises it where compiling is disabled."""

    def __init__(self, name: str) -> None:
        super().__init__("JIT compilation is disabled via FLASHINFER_DISABLE_JIT.\nmore")
        self.spec = SimpleNamespace(name=name)


def failing(error: Exception, when: Callable[[dict[str, Any]], bool]) -> Any:
    """`Wrapper.plan` that raises for some settings."""
    plan = Wrapper.plan

    def planned(self: Wrapper, *args: Any, **settings: Any) -> None:
        if when(settings):
            raise error
        plan(self, *args, **settings)

    return planned


def test_a_missing_kernel_is_named(
    backend: FlashInferCascade, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = failing(MissingJITCacheError("prefill_swa"), lambda s: s["window_left"] >= 0)
    monkeypatch.setattr(Wrapper, "plan", missing)

    backend.probe([SHAPE])
    with pytest.raises(BackendUnusable) as error:
        backend.probe([SHAPE, replace(SHAPE, window=9)])

    assert error.value.name == "prefill_swa"
    assert "bfloat16 heads of 64 with a window" in str(error.value)
    assert str(error.value).endswith("JIT compilation is disabled via FLASHINFER_DISABLE_JIT.")


@pytest.mark.parametrize("window", [None, 4])
def test_a_kernel_that_computes_something_else_is_not_used(
    backend: FlashInferCascade, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    run = Wrapper.run

    def natural(self: Wrapper, *args: Any, **settings: Any) -> Any:
        out, lse = run(self, *args, **settings)
        lse.add_(0.5)
        return out, lse

    shape = replace(SHAPE, window=window)
    backend.probe([shape])
    monkeypatch.setattr(Wrapper, "run", natural)

    with pytest.raises(BackendUnusable, match="wrongly"):
        backend.probe([shape])


# The choice of a backend


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """GPUs that were made the current one and still are, the last one last."""
    found: list[torch.device] = []

    @contextmanager
    def made(device: torch.device) -> Iterator[None]:
        found.append(device)
        yield
        found.pop()

    monkeypatch.setattr(torch.cuda, "device", made)
    return found


@pytest.fixture
def on_cuda(package: Any, current: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Solvers believe in a GPU and in FlashInfer; what they compute is on the CPU."""
    monkeypatch.setattr(
        "arbor.model.placement.find_spec", lambda name: object() if name == "flashinfer" else None
    )
    monkeypatch.setattr(
        "arbor.model.checkpoint.resolve_device", lambda device: torch.device("cuda")
    )
    load = loading.load_model
    monkeypatch.setattr(
        "arbor.model.weights.load_model",
        lambda source, dtype, device, **named: load(source, dtype, CPU, **named),
    )
    make = FlashInferCascade
    monkeypatch.setattr(
        flashinfer_cascade, "FlashInferCascade", lambda device, dtype: make(CPU, dtype)
    )
    return package


def chosen(checkpoint: Checkpoint) -> type[Any]:
    return type(checkpoint.load().runner.backend)


def broken_import(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)


def missing_kernel(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = failing(MissingJITCacheError("prefill_d64"), lambda settings: True)
    monkeypatch.setattr(Wrapper, "plan", missing)


@pytest.mark.parametrize(
    ("breaks", "words"), [(broken_import, "cannot be imported"), (missing_kernel, "prefill_d64")]
)
def test_auto_falls_back_to_torch_with_one_warning(
    on_cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[..., None],
    words: str,
) -> None:
    breaks(on_cuda, monkeypatch)
    checkpoint = Solver(dtype="bfloat16").checkpoint

    with caplog.at_level(logging.WARNING):
        assert chosen(checkpoint) is TorchCascade
        assert checkpoint.backend_name(checkpoint.read().info) == "torch"

    (warning,) = caplog.messages
    assert words in warning and "torch" in warning


@pytest.fixture
def with_triton(on_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solvers believe in Triton too."""
    monkeypatch.setattr("arbor.model.placement.find_spec", lambda name: object())
    tree_standin.install(monkeypatch)
    probe = TritonTree.probe
    monkeypatch.setattr(
        TritonTree,
        "probe",
        lambda self, shapes, dtype, device, **named: probe(self, shapes, dtype, CPU, **named),
    )


def test_auto_is_triton_where_it_is_measured_to_be_the_fastest(with_triton: None) -> None:
    assert chosen(Solver(dtype="bfloat16").checkpoint) is TritonTree
    assert chosen(Solver(dtype="float32").checkpoint) is TorchCascade
    assert chosen(Solver(dtype="bfloat16", backend="flashinfer").checkpoint) is FlashInferCascade
    whole = Solver(dtype="float32", kv_dtype="int8").checkpoint
    assert whole.backend_name(whole.read().info) == "triton"


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_kernels_are_tried_on_the_gpu_of_the_model(
    with_triton: None, current: list[torch.device], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    second, tried = torch.device("cuda:1"), []
    monkeypatch.setattr("arbor.model.checkpoint.resolve_device", lambda device: second)
    kernel = sys.modules[tree_standin.KERNEL]

    def noted(run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*given: Any, **named: Any) -> Any:
            tried.append(current[-1:])
            return run(*given, **named)

        return noting

    monkeypatch.setattr(kernel, "attend", noted(tree_standin.attend))
    monkeypatch.setattr(Wrapper, "run", noted(Wrapper.run))
    monkeypatch.setattr(Wrapper, "plan", noted(Wrapper.plan))

    Solver(dtype="bfloat16", backend=name).load()

    assert tried[0] == [second] and current == []


def test_all_that_runs_a_model_runs_it_on_its_gpu(current: list[torch.device]) -> None:
    runner, second = ModelRunner(build("llama"), TorchCascade()), torch.device("cuda:1")
    runner._launches, ran = partial(torch.cuda.device, second), []
    model: Any = runner.model
    for part in (model.lm_head, model.model.layers[0].self_attn):
        part.register_forward_pre_hook(lambda *given: ran.append(current[-1:]))
    state = torch.randn(2, model.config.hidden_size)

    runner.unembed(state)
    runner.rotations([0])

    assert len(ran) > 1 and all(each == [second] for each in ran)


def no_compiler(*given: Any) -> Any:
    raise RuntimeError("Failed to find C compiler. Please specify via CC.")


def wrong(*given: Any) -> Any:
    out, lse = tree_standin.attend(*given)
    return out, lse + 0.5


@pytest.mark.parametrize(
    ("attend", "words"), [(no_compiler, "Failed to find C compiler"), (wrong, "wrongly")]
)
def test_without_a_right_kernel_of_triton_auto_falls_back_to_flashinfer(
    with_triton: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    attend: Any,
    words: str,
) -> None:
    monkeypatch.setattr(sys.modules[tree_standin.KERNEL], "attend", attend)
    with caplog.at_level(logging.WARNING):
        assert chosen(Solver(dtype="bfloat16").checkpoint) is FlashInferCascade
    (warning,) = caplog.messages
    assert words in warning and "attention runs in flashinfer" in warning
    for settings in ({"backend": "triton"}, {"kv_dtype": "int8"}):
        with pytest.raises(UsageError, match=words):
            Solver(dtype="bfloat16", **settings).load()


def test_kernels_for_8_bit_kv_are_tried_before_the_weights_are_read(
    with_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, load = [], weights.load_model

    def attend(*given: Any) -> Any:
        read.append(given[-1].dtype)
        return tree_standin.attend(*given) if read[-1] == torch.bfloat16 else wrong(*given)

    def loaded(*given: Any, **named: Any) -> Any:
        read.append(None)
        return load(*given, **named)

    monkeypatch.setattr(sys.modules[tree_standin.KERNEL], "attend", attend)
    monkeypatch.setattr(weights, "load_model", loaded)
    with pytest.raises(UsageError, match="heads of 64 in bfloat16 over 8-bit KV wrongly") as error:
        Solver(dtype="bfloat16", kv_dtype="int8").load()
    assert "leave kv_dtype out" in error.value.hint
    assert read == [torch.bfloat16, torch.int8]
    assert chosen(Solver(dtype="bfloat16").checkpoint) is TritonTree
    assert read[2:4] == [torch.bfloat16, None] and torch.int8 not in read[4:]


def test_8_bit_kv_on_a_gpu_is_for_triton_that_is_not_deterministic(with_triton: None) -> None:
    assert chosen(Solver(dtype="bfloat16", kv_dtype="int8", backend="triton").checkpoint) is (
        TritonTree
    )
    for device in ("auto", "cuda"):
        with pytest.raises(UsageError, match="--deterministic does not read 8-bit KV") as error:
            Solver(dtype="bfloat16", kv_dtype="int8", deterministic=True, device=device).load()
        assert error.value.code == "kv-dtype"


def test_8_bit_kv_of_an_odd_number_of_channels_is_refused_on_a_gpu(
    with_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Solver(dtype="bfloat16", kv_dtype="int8").checkpoint
    info = replace(checkpoint.read().info, head_dims=(64, 65))
    with pytest.raises(UsageError, match="channels, and the model's have 65") as error:
        checkpoint.backend_name(info)
    assert error.value.code == "kv-dtype"


def test_a_device_too_full_for_flashinfer_is_out_of_memory(
    on_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")
    monkeypatch.setattr(Wrapper, "plan", failing(full, lambda settings: True))
    monkeypatch.setattr("arbor.memory.out_of_memory.free_bytes", lambda device: 1 << 20)

    with pytest.raises(OutOfMemory, match="cuda"):
        Solver(dtype="bfloat16").load()


# Placement and loading


@pytest.mark.parametrize(
    ("device", "accelerate", "placement"),
    [
        ("cuda", True, {"device_map": {"": torch.device("cuda")}}),
        ("cuda:1", True, {"device_map": {"": torch.device("cuda:1")}}),
        ("cuda", False, {}),
        ("cpu", True, {}),
    ],
)
def test_weights_for_a_gpu_go_there_directly(
    monkeypatch: pytest.MonkeyPatch, device: str, accelerate: bool, placement: dict[str, Any]
) -> None:
    given: dict[str, Any] = {}
    moved: list[torch.device] = []

    class Model:
        def parameters(self) -> list[Tensor]:
            return []

        def to(self, device: torch.device) -> Model:
            moved.append(device)
            return self

    def load(path: str, **settings: Any) -> tuple[Model, dict[str, Any]]:
        given.update(settings)
        return Model(), {}

    monkeypatch.setattr(ACCELERATE, lambda: accelerate)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)

    loading.load_model(
        loading.locate_model("builtin:sapling"), torch.bfloat16, torch.device(device)
    )

    assert {name: given[name] for name in given if name == "device_map"} == placement
    assert moved == [torch.device(device)]
