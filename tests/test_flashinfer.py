"""The FlashInfer backend against a stand-in for the package and its planner's arithmetic."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support import flashinfer_standin as standin
from support.flashinfer_standin import MULTIPROCESSORS, Events, Wrapper, demand
from support.slow_cases import only
from torch import Tensor

from arbor import Solver
from arbor.errors import OutOfMemory, UsageError
from arbor.kernels.attention import flashinfer_cascade
from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel
from arbor.kernels.attention.flashinfer_cascade import (
    MEBIBYTE,
    FlashInferCascade,
    FlashInferUnusable,
    workspace_bytes,
)
from arbor.kernels.attention.reference import ReferenceAttention
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.model import loading
from arbor.model.checkpoint import Checkpoint
from arbor.model.placement import device_of_model
from arbor.model.plan import Piece, Segment, plan_forward

SLOTS = 96
ACCELERATE = "transformers.utils.import_utils.is_accelerate_available"
CPU = torch.device("cpu")
OLD_WORKSPACE = 128 * MEBIBYTE
SHAPE = AttentionShape(8, 2, 64, 64, 64**-0.5)


def shape_of(heads: int, kv_heads: int, dim: int) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, dim, dim**-0.5)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Events]:
    return standin.install(monkeypatch)


@pytest.fixture
def package(installed: tuple[Any, Events]) -> Any:
    """The stand-in, installed."""
    return installed[0]


@pytest.fixture
def events(installed: tuple[Any, Events]) -> Events:
    """What happened to CUDA's events."""
    return installed[1]


@pytest.fixture
def backend(package: Any) -> FlashInferCascade:
    return FlashInferCascade(CPU)


def level(requests: list[tuple[int, list[int]]], *, causal: bool) -> CascadeLevel:
    """A level from (rows, slots) per request."""
    rows = np.cumsum([0, *(count for count, _ in requests)]).astype(np.int32)
    ends = np.cumsum([0, *(len(slots) for _, slots in requests)]).astype(np.int32)
    slots = np.array([slot for _, several in requests for slot in several], np.int32)
    return CascadeLevel(*map(torch.from_numpy, (rows, ends, slots)), causal)


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
    reference = ReferenceAttention()

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
    reference = ReferenceAttention()

    out, lse = backend.run(backend.plan(layout, shape), *given, logits)

    right, right_lse = reference.run(reference.plan(layout, shape), *given, logits)
    torch.testing.assert_close(out.float(), right.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, right_lse, atol=2e-2, rtol=1e-2)


def test_what_flashinfer_has_no_kernel_for_is_refused(backend: FlashInferCascade) -> None:
    layout = plan_forward(tree_of_segments()).layout(None)

    with pytest.raises(ValueError, match="head_dim"):
        backend.plan(layout, AttentionShape(8, 2, 48, 48, 0.125))
    with pytest.raises(ValueError, match="head_dim"):
        backend.probe([AttentionShape(8, 2, 64, 512, 0.125)])
    with pytest.raises(ValueError, match="float32"):
        FlashInferCascade(CPU, torch.float32)


# Planning


def test_a_level_is_planned_once_per_wrapper(backend: FlashInferCascade) -> None:
    layout = plan_forward(tree_of_segments()).layout(None)
    *shared, last = layout.levels
    grown = CascadeLayout(layout.rows, (*shared, replace(last)))

    first = backend.plan(layout, SHAPE)
    again = backend.plan(layout, SHAPE)
    assert len(set(map(id, first.wrappers))) == 3 and first.wrappers == again.wrappers
    assert [wrapper.planned for wrapper in first.wrappers] == [1, 1, 1]

    backend.plan(grown, SHAPE)
    assert [wrapper.planned for wrapper in first.wrappers] == [2, 1, 1]
    compare(backend, layout, SHAPE)
    assert [wrapper.planned for wrapper in first.wrappers] == [3, 1, 1]


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


@pytest.mark.parametrize(
    ("version", "short"), [("0.6.18", True), ("0.6.20", True), ("0.7.2", False)]
)
def test_lengths_are_shortened_only_for_the_series_that_was_read(
    package: Any, version: str, short: bool
) -> None:
    package.__version__ = version
    backend = FlashInferCascade(CPU)
    layout = plan_forward(tree_of_segments()).layout(None)

    last = backend.plan(layout, SHAPE).wrappers[0]

    assert ("seq_lens" in last.settings) == short
    assert ("max_token_per_sequence" in last.settings) == short
    if short:  # the hole's three rows
        assert last.settings["max_token_per_sequence"] == 3
        assert last.settings["seq_lens"].shape == (1,)


def test_a_staging_buffer_is_free_before_the_next_plan_writes_to_it(
    backend: FlashInferCascade, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper's plan is followed by an event of its own; its next plan waits for that one."""
    plan = Wrapper.plan

    def planned(self: Wrapper, *args: Any, **settings: Any) -> None:
        events.log.append(("plan", self))
        plan(self, *args, **settings)

    monkeypatch.setattr(Wrapper, "plan", planned)
    for _ in range(2):
        backend.plan(plan_forward(tree_of_segments()).layout(None), SHAPE)

    first, second = events.log[:6], events.log[6:]
    assert [what for what, _ in first] == ["plan", "record"] * 3
    assert [what for what, _ in second] == ["wait", "plan", "record"] * 3
    for index in range(3):
        wrapper, event = first[2 * index][1], first[2 * index + 1][1]
        assert second[3 * index : 3 * index + 3] == [
            ("wait", event),
            ("plan", wrapper),
            ("record", event),
        ]
    assert len({id(which) for _, which in first}) == 6


@pytest.mark.parametrize("inside_first", [True, False])
def test_wrappers_are_planned_inside_and_outside_inference_mode(
    backend: FlashInferCascade, inside_first: bool
) -> None:
    for inside in (inside_first, not inside_first, inside_first):
        with torch.inference_mode(inside):
            layout = plan_forward(tree_of_segments()).layout(None)
            plan = backend.plan(layout, SHAPE)
            given = inputs(layout.rows, SHAPE)
            backend.run(plan, *given)
        with torch.inference_mode(not inside):
            out, _ = backend.run(plan, *given)
        assert out.isfinite().all()


# Results


def test_a_result_is_kept_while_later_layers_run(backend: FlashInferCascade) -> None:
    layout = plan_forward(tree_of_segments()).layout(None)
    plan = backend.plan(layout, SHAPE)
    q, k, v = inputs(layout.rows, SHAPE)

    out, lse = backend.run(plan, q, k, v)
    kept = out.clone(), lse.clone()
    other = plan.other
    later, _ = backend.run(plan, q, k, 2 * v)

    assert torch.equal(out, kept[0]) and torch.equal(lse, kept[1])
    assert plan.other is other, "one buffer serves all layers of a forward"
    torch.testing.assert_close(later.float(), 2 * out.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (64, 8, 128),
        (96, 8, 128),
        (128, 8, 64),
        (160, 10, 64),
        (32, 8, 256),
        (40, 8, 256),
        (71, 1, 128),
    ],
)
def test_any_number_of_heads_is_merged(
    backend: FlashInferCascade, heads: int, kv_heads: int, dim: int
) -> None:
    compare(backend, plan_forward(tree_of_segments()).layout(None), shape_of(heads, kv_heads, dim))


def test_a_row_that_reads_nothing_weighs_nothing(backend: FlashInferCascade) -> None:
    """FlashInfer reports such rows with a logsumexp of about -50,000, not minus infinity."""
    layout = CascadeLayout(
        3,
        (
            level([(1, []), (1, [3, 4]), (1, [])], causal=False),
            level([(1, []), (2, [5])], causal=False),
            level([(1, []), (1, []), (1, [7])], causal=False),
        ),
    )
    q, k, v = inputs(3, SHAPE)
    plan, sinks = backend.plan(layout, SHAPE), torch.randn(8)

    out, lse = backend.run(plan, q, k, v)
    with_sinks, lse_with_sinks = backend.run(plan, q, k, v, sinks)

    assert out.isfinite().all() and lse.isfinite().all()
    assert not out[0].any() and (lse[0] < -30_000).all()
    assert not with_sinks[0].any() and torch.equal(lse_with_sinks[0], sinks)
    reference = ReferenceAttention()
    right, right_lse = reference.run(reference.plan(layout, SHAPE), q, k, v)
    torch.testing.assert_close(out[1:].float(), right[1:].float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[1:], right_lse[1:], atol=2e-2, rtol=1e-2)
    mass = backend.mass(plan, q, k, lse)
    assert mass.isfinite().all()
    assert float(mass.sum()) == pytest.approx(2 * 8, rel=2e-2)  # rows 1 and 2, all heads


# Workspace

# heads, KV heads, values of a head; rows and keys of the request that 128 MiB were too small for
LARGE = {
    "Qwen3-32B, leaves": (64, 8, 128, 64, 1024),
    "Qwen3-32B, prefill": (64, 8, 128, 256, 256),
    "Qwen3-30B-A3B, leaves": (32, 4, 128, 64, 2048),
    "Qwen2.5-3B, prefill": (16, 2, 128, 1024, 1024),
    "Gemma-2B, prefill": (8, 1, 256, 1024, 1024),
}
FITTING = {"Llama-8B": (32, 8, 128), "Qwen2.5-7B": (28, 4, 128)}


@pytest.mark.parametrize("name", LARGE)
def test_the_workspace_suffices_where_128_mebibytes_did_not(
    backend: FlashInferCascade, name: str
) -> None:
    heads, kv_heads, dim, rows, keys = LARGE[name]
    needed = demand([0, rows], [0, keys], heads, kv_heads, dim).float_bytes

    assert (
        OLD_WORKSPACE < needed <= workspace_bytes(shape_of(heads, kv_heads, dim), MULTIPROCESSORS)
    )
    request = level([(rows, [0] * keys)], causal=False)
    backend.plan(CascadeLayout(rows, (request,)), shape_of(heads, kv_heads, dim))


@pytest.mark.parametrize("name", FITTING)
def test_the_workspace_is_no_larger_than_a_shape_needs(name: str) -> None:
    heads, kv_heads, dim = FITTING[name]
    bound = workspace_bytes(shape_of(heads, kv_heads, dim), MULTIPROCESSORS)
    largest = max(
        demand([0, rows], [0, 16_384], heads, kv_heads, dim).float_bytes for rows in range(1, 300)
    )

    assert largest == bound < OLD_WORKSPACE


def test_no_plan_asks_for_more_than_the_workspace() -> None:
    rng = np.random.default_rng(0)
    splits = 0
    for _ in range(2000):
        kv_heads, group = int(rng.integers(1, 33)), int(rng.integers(1, 17))
        dim, sms = int(rng.choice([64, 128, 256])), int(rng.choice([16, 78, 108, 132, 148]))
        requests = int(rng.integers(1, 40))
        rows = rng.integers(1, rng.choice([2, 8, 600]), requests)
        keys = rng.integers(0, rng.choice([200, 2000, 30_000]), requests)
        needed = demand(
            [0, *np.cumsum(rows).tolist()],
            [0, *np.cumsum(keys).tolist()],
            kv_heads * group,
            kv_heads,
            dim,
            window_left=int(rng.choice([-1, 500])),
            multiprocessors=sms,
        )
        splits += needed.split
        assert needed.float_bytes <= workspace_bytes(shape_of(kv_heads * group, kv_heads, dim), sms)
    assert splits > 200, "the search for a chunk was tried"


@pytest.mark.parametrize("rows_each", [1, 3, 262_144])
@pytest.mark.parametrize("group", only([7], [7, 64]))
def test_the_planned_indices_of_the_longest_forward_fit(rows_each: int, group: int) -> None:
    """262,144 rows: one prompt, or as many requests of a row as a rehydrated path has holes."""
    ends = [*range(0, 262_144, rows_each), 262_144]
    for dim in (64, 256):
        keys = [1000 * i for i in range(len(ends))]
        assert demand(ends, keys, group, 1, dim).int_bytes <= standin.INT_WORKSPACE_BYTES


def test_a_larger_shape_gets_a_larger_workspace_and_earlier_plans_stay(
    backend: FlashInferCascade, events: Events
) -> None:
    layout = plan_forward(tree_of_segments()).layout(None)
    small = backend.plan(layout, SHAPE)
    recorded = [event for what, event in events.log if what == "record"]
    given = inputs(layout.rows, SHAPE)
    before, _ = backend.run(small, *given)

    large = backend.plan(layout, shape_of(64, 8, 128))

    assert [e for what, e in events.log if what == "wait"] == recorded, "staging buffers are freed"
    assert torch.equal(backend.run(small, *given)[0], before)
    again = backend.plan(layout, SHAPE)
    sizes = [plan.wrappers[0].workspace.numel() for plan in (small, large, again)]
    assert sizes[0] < sizes[1] == sizes[2]
    assert again.wrappers[0].workspace is large.wrappers[0].workspace


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


def test_every_variant_is_tried_once(
    backend: FlashInferCascade, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[AttentionShape] = []
    plan = FlashInferCascade.plan

    def planned(self: FlashInferCascade, layout: CascadeLayout, shape: AttentionShape) -> Any:
        tried.append(shape)
        return plan(self, layout, shape)

    monkeypatch.setattr(FlashInferCascade, "plan", planned)
    wide, near = shape_of(64, 8, 128), replace(SHAPE, window=1)

    backend.probe([SHAPE, replace(SHAPE, scaling=1.0), near, replace(SHAPE, softcap=5.0), wide])

    assert len(tried) == 4 and {near, wide} < set(tried)
    size = backend.plan(plan_forward(tree_of_segments()).layout(None), SHAPE).wrappers[0].workspace
    assert size.numel() == workspace_bytes(wide, MULTIPROCESSORS), "sized for the largest at once"


def test_a_missing_kernel_is_named(
    backend: FlashInferCascade, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = failing(MissingJITCacheError("prefill_swa"), lambda s: s["window_left"] >= 0)
    monkeypatch.setattr(Wrapper, "plan", missing)

    backend.probe([SHAPE])
    with pytest.raises(FlashInferUnusable) as error:
        backend.probe([SHAPE, replace(SHAPE, window=9)])

    assert error.value.name == "prefill_swa"
    assert "bfloat16 heads of 64 with a window" in str(error.value)
    assert str(error.value).endswith("JIT compilation is disabled via FLASHINFER_DISABLE_JIT.")


def test_a_missing_merge_is_found(backend: FlashInferCascade, package: Any) -> None:
    def merge(*states: Tensor) -> None:
        raise MissingJITCacheError("cascade")

    package.merge_state_in_place = merge

    with pytest.raises(FlashInferUnusable, match="module cascade"):
        backend.probe([SHAPE])


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

    with pytest.raises(FlashInferUnusable, match="wrongly"):
        backend.probe([shape])


def test_a_full_device_is_not_a_missing_kernel(
    backend: FlashInferCascade, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")
    monkeypatch.setattr(Wrapper, "plan", failing(full, lambda settings: True))

    with pytest.raises(torch.OutOfMemoryError):
        backend.probe([SHAPE])


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'tvm_ffi'", name="tvm_ffi"),
        RuntimeError("flashinfer-cubin version (0.6.1) does not match"),
        OSError("libcudart.so.13: cannot open shared object file"),
    ],
)
def test_a_package_that_cannot_be_imported_is_unusable(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(flashinfer_cascade.importlib, "import_module", fail)

    with pytest.raises(FlashInferUnusable) as caught:
        FlashInferCascade(CPU)

    assert str(error) in str(caught.value)
    assert caught.value.name == (getattr(error, "name", None) or "flashinfer")


# The choice of a backend


@pytest.fixture
def on_cuda(package: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Solvers believe in a GPU and in FlashInfer; what they compute is on the CPU."""
    monkeypatch.setattr("arbor.model.placement.find_spec", lambda name: object())
    monkeypatch.setattr("arbor.model.checkpoint.find_spec", lambda name: object())
    monkeypatch.setattr(
        "arbor.model.checkpoint.resolve_device", lambda device: torch.device("cuda")
    )
    load = loading.load_model
    monkeypatch.setattr(
        "arbor.model.weights.load_model", lambda source, dtype, device: load(source, dtype, CPU)
    )
    make = FlashInferCascade
    monkeypatch.setattr(
        flashinfer_cascade, "FlashInferCascade", lambda device, dtype: make(CPU, dtype)
    )
    return package


def chosen(checkpoint: Checkpoint) -> type[Any]:
    return type(checkpoint.load().runner.backend)


@pytest.mark.parametrize("name", ["auto", "flashinfer"])
def test_flashinfer_is_used_where_its_kernels_work(on_cuda: Any, name: str) -> None:
    checkpoint = Solver(backend=name, dtype="bfloat16").checkpoint

    assert chosen(checkpoint) is FlashInferCascade
    assert checkpoint.backend_name(checkpoint.read().info) == "flashinfer"


def test_decode_steps_are_captured_on_a_gpu_unless_that_is_off(on_cuda: Any) -> None:
    for setting, captured in ((True, True), (False, False)):
        checkpoint = Solver(dtype="bfloat16", cuda_graphs=setting).checkpoint
        assert (checkpoint.load().runner.graphs is not None) == captured
    other = Solver(dtype="bfloat16", backend="torch").checkpoint
    assert other.load().runner.graphs is None


def test_no_step_is_captured_on_a_cpu() -> None:
    assert Solver(device="cpu").checkpoint.load().runner.graphs is None


def test_a_configuration_names_graphs_only_where_they_are_off() -> None:
    on, off = Solver(device="cpu"), Solver(device="cpu", cuda_graphs=False)

    assert "cuda_graphs" not in on.config and off.config["cuda_graphs"] is False
    assert not Solver.from_config(off.config).checkpoint.cuda_graphs
    assert Solver.from_config(on.config).checkpoint.cuda_graphs


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


@pytest.mark.parametrize(
    ("breaks", "module"), [(broken_import, "flashinfer"), (missing_kernel, "prefill_d64")]
)
def test_flashinfer_by_name_says_which_module_is_missing(
    on_cuda: Any, monkeypatch: pytest.MonkeyPatch, breaks: Callable[..., None], module: str
) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("weights were loaded")

    breaks(on_cuda, monkeypatch)
    monkeypatch.setattr("arbor.model.weights.load_model", load)

    with pytest.raises(UsageError, match=module) as error:
        Solver(dtype="bfloat16", backend="flashinfer").load()

    assert error.value.code == "backend" and error.value.data["module"] == module
    assert "arbor-search[cuda]" in error.value.hint and "--backend torch" in error.value.hint


def test_a_device_too_full_for_flashinfer_is_out_of_memory(
    on_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")
    monkeypatch.setattr(Wrapper, "plan", failing(full, lambda settings: True))
    monkeypatch.setattr("arbor.memory.out_of_memory.free_bytes", lambda device: 1 << 20)

    with pytest.raises(OutOfMemory, match="cuda"):
        Solver(dtype="bfloat16").load()


# Placement and loading


def test_a_model_on_several_devices_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))

    with pytest.raises(UsageError, match="several devices: cpu, meta") as error:
        device_of_model(model, "auto", "auto")

    assert error.value.code == "device" and error.value.data["devices"] == ["cpu", "meta"]


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


@pytest.mark.parametrize(("accelerate", "where"), [(True, "cuda"), (False, "cpu")])
def test_weights_too_large_name_the_memory_they_did_not_fit(
    monkeypatch: pytest.MonkeyPatch, accelerate: bool, where: str
) -> None:
    def load(path: str, **settings: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.")

    monkeypatch.setattr(ACCELERATE, lambda: accelerate)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr("arbor.memory.out_of_memory.free_bytes", lambda device: 1 << 20)

    with pytest.raises(OutOfMemory, match=rf"\[oom\] {where}: the weights"):
        loading.load_model(
            loading.locate_model("builtin:sapling"), torch.bfloat16, torch.device("cuda")
        )
