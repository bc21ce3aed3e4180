"""Decode steps by CUDA graphs, against a FlashInfer stand-in and a tape of tensor operations."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import flashinfer_standin as standin
from support import tree_standin
from support.flashinfer_standin import MULTIPROCESSORS, Wrapper, demand
from support.graph_tape import Broken, Tape, nothing
from support.models import config_of, copy_of, random_model
from support.slow_cases import every
from support.trees import Lab, relative_error
from torch import Tensor

from arbor.kernels import int8
from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel
from arbor.kernels.attention.fixed import ROWS, Bucket, pad_last, pad_shared
from arbor.kernels.attention.flashinfer_cascade import FlashInferCascade, launch_of
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.triton_tree import TritonTree
from arbor.kernels.int8 import encode
from arbor.memory.pool import KVPool
from arbor.model import graphs
from arbor.model.graphs import DecodeGraphs, Recording
from arbor.model.plan import ForwardPlan, Piece, Segment, SharedPrefix, plan_forward
from arbor.model.runner import ModelRunner

CPU = torch.device("cpu")
SLOTS = 300
HEADS: dict[str, Any] = {"hidden_size": 64, "head_dim": 64, "num_hidden_layers": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: random_model(config_of("llama", **HEADS)),
    "mistral, windows": lambda: random_model(config_of("mistral", **HEADS, sliding_window=9)),
    "gemma2, windows and soft caps": lambda: random_model(
        config_of(
            "gemma2",
            **HEADS,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=12,
            attn_logit_softcapping=3.0,
        )
    ),
}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, installed."""
    return standin.install(monkeypatch)[0]


@pytest.fixture
def backend(package: Any) -> FlashInferCascade:
    return FlashInferCascade(CPU)


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is captured when it is first met."""
    monkeypatch.setattr(graphs, "PATIENCE", 0)


def runner_of(model: Any, backend: FlashInferCascade, recorder: Any = None) -> ModelRunner:
    return ModelRunner(model.to(torch.bfloat16), backend, recorder)


def graphs_of(runner: ModelRunner) -> DecodeGraphs:
    assert runner.graphs is not None
    return runner.graphs


@pytest.fixture
def runner(backend: FlashInferCascade, tape: Tape) -> ModelRunner:
    return runner_of(MODELS["llama"](), backend, tape)


def pool_of(runner: ModelRunner, slots: int = SLOTS) -> KVPool:
    """A pool of random K/V, and NaN in the trash slot."""
    torch.manual_seed(slots)
    pool = KVPool(runner.layer_kv, slots, runner.dtype, CPU)
    for part in (*pool.k, *pool.v):
        part.normal_()
    pool.poison(np.array([pool.trash], np.int32))
    return pool


def twin_of(pool: KVPool) -> KVPool:
    twin = KVPool(pool.layers, pool.slots, pool.dtype, CPU)
    for mine, theirs in zip((*twin.k, *twin.v), (*pool.k, *pool.v), strict=True):
        mine.copy_(theirs)
    return twin


@torch.inference_mode()
def eager(runner: ModelRunner, plan: ForwardPlan, pool: KVPool) -> Tensor:
    """The same runner's logits without a graph."""
    return runner._forward(plan, pool, runner.layer_count - 1).logits


class Tree:
    """Random decoding leaves over shared blocks of at most three depths, in depth-first order."""

    def __init__(self, rows: int, seed: int, depths: int = 3) -> None:
        self.random = np.random.default_rng(seed)
        self.free = list(self.random.permutation(SLOTS))
        self.contexts: list[tuple[Piece, ...]] = []
        self._split((), 0, rows, depths)
        self.tails: list[list[int]] = [[] for _ in self.contexts]
        self.shared: SharedPrefix | None = None

    def _split(self, context: tuple[Piece, ...], length: int, rows: int, depths: int) -> None:
        size = int(self.random.integers(1, 6))
        slots = np.array([self.free.pop() for _ in range(size)], np.int32)
        positions = np.arange(length, length + size, dtype=np.int32)
        context = (*context, Piece(len(self.free), slots, positions))
        if rows == 1 or depths == 1:
            self.contexts += [context] * rows
            return
        first = int(self.random.integers(1, rows))
        for part in (first, rows - first):
            if part == 1 and self.random.random() < 0.5:
                self.contexts.append(context)  # a leaf right here: it reads nothing further down
            else:
                self._split(context, length + size, part, depths - 1)

    def step(self) -> ForwardPlan:
        """The next token of every leaf."""
        segments = []
        for context, tail in zip(self.contexts, self.tails, strict=True):
            tail.append(self.free.pop())
            own = np.array(tail, np.int32)
            end = int(context[-1].positions[-1]) + len(tail)
            token = int(self.random.integers(3, 97))
            segments.append(Segment(context, [token], np.array([end]), own, own[-1:], logits=1))
        plan = plan_forward(segments, shared=self.shared)
        self.shared = plan.shared
        return plan


def changed(before: KVPool, after: KVPool) -> set[int]:
    """Slots whose K/V differ in any layer."""
    found: set[int] = set()
    for a, b in zip((*before.k, *before.v), (*after.k, *after.v), strict=True):
        same = torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).flatten(1).all(1)
        found.update((~same).nonzero().flatten().tolist())
    return found


# Steps


@pytest.mark.parametrize("name", every(3, MODELS))
def test_replayed_steps_give_what_the_model_gives(
    backend: FlashInferCascade, tape: Tape, name: str
) -> None:
    model = MODELS[name]()
    plain = runner_of(copy_of(model), FlashInferCascade(CPU))
    runner = runner_of(model, backend, tape)
    pool = pool_of(runner)

    for rows, seed in ((1, 0), (3, 1), (3, 2), (7, 3), (8, 4), (13, 5)):
        tree = Tree(rows, seed)
        for _ in range(3):
            before, plan = twin_of(pool), tree.step()
            want = plain.forward(plan, before).logits
            untouched = twin_of(pool)

            got = runner.forward(plan, pool).logits

            assert got.shape == want.shape and got.dtype == torch.float32
            assert relative_error(got, want) < 0.03
            own = set(plan.write.tolist())
            assert own <= changed(untouched, pool) <= own | {pool.trash}
            for mine, theirs in zip((*pool.k, *pool.v), (*before.k, *before.v), strict=True):
                assert relative_error(mine[plan.write], theirs[plan.write]) < 0.03

    met = len(graphs_of(runner).buckets)
    assert tape.recorded == met >= 4
    assert tape.replays == 18, "every step was replayed, the first of a bucket too"


def test_a_step_whose_tokens_only_the_device_knows_is_replayed(runner: ModelRunner) -> None:
    pool, tree = pool_of(runner), Tree(5, 3)
    for _ in range(3):
        plan = tree.step()
        want = eager(runner, plan, twin_of(pool))
        plan.ids_there, plan.ids = plan.ids, torch.zeros_like(plan.ids)
        assert relative_error(runner.forward(plan, pool).logits, want) < 0.03
    assert len(graphs_of(runner).buckets) == 1


def mixed(seed: int) -> ForwardPlan:
    """Prompts, questions after shared paths, and rows that decode; some want logits, some not."""
    random = np.random.default_rng(seed)
    free = random.permutation(SLOTS).astype(np.int32).tolist()

    def taken(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([free.pop() for _ in range(count)], np.int32)

    root = Piece(0, taken(20), np.arange(20, dtype=np.int32))
    found = []
    for path in range(4):
        length = int(random.integers(1, 9))
        places = np.arange(20, 20 + length, dtype=np.int32)
        context = (root, Piece(1 + path, taken(length), places))
        for _ in range(int(random.integers(1, 4))):
            count, before = int(random.integers(1, 6)), int(random.integers(0, 3))
            tail = taken(before + count)
            at = 20 + length + before + np.arange(count)
            wanted = int(random.integers(0, 2))
            found.append(Segment(context, [5] * count, at, tail, tail[before:], wanted))
    prompt = taken(int(random.integers(2, 12)))
    ids = random.integers(1, 60, len(prompt)).tolist()
    found.append(Segment((), ids, np.arange(len(prompt)), prompt, prompt, len(prompt)))
    return plan_forward(found)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_with_questions_and_prompts_is_replayed_by_the_tree_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch, tape: Tape
) -> None:
    tree_standin.install(monkeypatch)
    runner = ModelRunner(MODELS[name]().to(torch.bfloat16), TritonTree(), tape)
    pool = pool_of(runner)
    for seed in range(6):
        plan, twin = mixed(seed), twin_of(pool)
        want = eager(runner, plan, twin)

        got = runner.forward(plan, pool).logits

        assert got.shape == want.shape == (len(plan.logit_rows), got.shape[1])
        assert relative_error(got, want) < 0.03
        for mine, theirs in zip((*pool.k, *pool.v), (*twin.k, *twin.v), strict=True):
            assert relative_error(mine[plan.write], theirs[plan.write]) < 0.03
    assert tape.replays == 6 > tape.recorded, "a graph is for any step of its size"


def test_steps_over_8_bit_kv_are_replayed(monkeypatch: pytest.MonkeyPatch, tape: Tape) -> None:
    tree_standin.install(monkeypatch)
    monkeypatch.setattr(int8, "native_library", lambda: None)  # a GPU writes by tensor operations
    model = MODELS["llama"]().to(torch.bfloat16)
    runner = ModelRunner(model, TritonTree(), tape, kv_dtype=torch.int8)
    pool = KVPool(runner.layer_kv, SLOTS, torch.int8, CPU)
    for part in (*pool.k, *pool.v):
        part.copy_(encode(torch.randn(*part.shape[:2], 64)))
    tree = Tree(5, 3)

    for _ in range(3):
        plan = tree.step()
        twin = twin_of(pool)
        want = eager(runner, plan, twin)

        got = runner.forward(plan, pool).logits

        assert relative_error(got, want) < 0.03
        assert torch.equal(pool.k[0][plan.write], twin.k[0][plan.write])

    assert tape.recorded == 1 and tape.replays == 3


@pytest.mark.slow
def test_a_budget_of_fewer_slots_than_a_wide_step_has_rows_gives_the_same_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs are made for the steps that fit, and a capture takes the slots of its step alone."""
    tree_standin.install(monkeypatch)
    model = random_model(config_of("llama"))

    def sprouted(slots: int) -> tuple[Lab, list[list[int]], int]:
        lab = Lab(copy_of(model), TritonTree(), recorder=Tape(), debug=True)
        tree = lab.plant(slots)
        lab.sprout([(tree.root, 24)])
        widest = max(bucket.rows for bucket in graphs_of(lab.runner).buckets)
        return lab, [node.tokens for node in tree], widest

    _, wanted, widest = sprouted(4096)
    lab, found, narrow = sprouted(20)

    assert found == wanted
    assert widest == 24 and narrow <= 16 and lab.memory.peak <= 20  # the prompt, then two rows


def test_wrappers_are_freed_when_their_plans_are_copied(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, made = standin.install(monkeypatch)[1].log, Wrapper.__init__

    def init(self: Wrapper, *given: Any, **settings: Any) -> None:
        made(self, *given, **settings)
        weakref.finalize(self, lambda: log.append(("freed", None)))

    monkeypatch.setattr(Wrapper, "__init__", init)
    pool, tree = pool_of(runner), Tree(3, 0)
    for _ in range(3):
        runner.forward(tree.step(), pool)
    assert log[-1][0] == "record"

    runner.forward(tree.step(), pool_of(runner, SLOTS + 1))

    before = log[: log.index(("freed", None))]
    last = max(at for at, (what, _) in enumerate(before) if what == "record")
    assert ("wait", before[last][1]) in before[last:]


def test_a_bucket_is_captured_after_some_steps(
    runner: ModelRunner, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "PATIENCE", 2)
    pool, tree = pool_of(runner), Tree(3, 0)

    for recorded in (0, 0, 1, 1):
        runner.forward(tree.step(), pool)
        assert tape.recorded == recorded


# Steps without a graph


def test_other_forwards_run_without_a_graph(
    runner: ModelRunner, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, tree = pool_of(runner), Tree(3, 0)
    slots = np.arange(4, dtype=np.int32)
    prompt = Segment((), [5, 6, 7, 8], np.arange(4), slots, slots, logits=4)
    silent = Segment((), [5], np.arange(1), slots[:1], slots[:1], logits=0)

    runner.forward(plan_forward([prompt]), pool)
    runner.forward(plan_forward([silent]), pool)
    runner.forward(tree.step(), pool, hidden=[0])
    runner.forward(tree.step(), pool, stop_after=0)
    runner.forward(tree.step(), pool, leave=lambda layer, hidden, rows: None)
    runner.forward(tree.step(), pool, mass={0: None})
    assert tape.recorded == tape.replays == 0

    runner.forward(tree.step(), pool)
    assert tape.recorded == tape.replays == 1


# Checks on first use


def twice_the_logits(step: Callable[[], None]) -> None:
    step()
    output: Tensor = step.__closure__[-1].cell_contents._output  # type: ignore[attr-defined]
    output.mul_(2)


def no_keys_and_values(step: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVPool, "write", lambda *arguments: None)
        step()


@pytest.mark.parametrize("replay", [nothing, twice_the_logits, no_keys_and_values])
def test_a_graph_that_computes_something_else_is_not_used(
    backend: FlashInferCascade,
    caplog: pytest.LogCaptureFixture,
    replay: Callable[[Callable[[], None]], None],
) -> None:
    runner = runner_of(MODELS["llama"](), backend, Broken(replay))
    pool, tree = pool_of(runner), Tree(3, 0)

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            before, plan = twin_of(pool), tree.step()
            want = eager(runner, plan, before)

            got = runner.forward(plan, pool).logits

            assert torch.equal(got, want)
            assert changed(before, pool) <= {pool.trash}

    (warning,) = caplog.messages
    assert "4 rows" in warning and "replayed" in warning
    assert graphs_of(runner).buckets == ()


def test_a_capture_that_fails_ends_the_use_of_graphs(
    backend: FlashInferCascade, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        tried = 0

        def record(self, step: Callable[[], None]) -> Recording:
            self.tried += 1
            raise RuntimeError("CUDA error: operation not permitted\nmore")

    recorder = Refusing()
    runner = runner_of(MODELS["llama"](), backend, recorder)
    pool = pool_of(runner)

    for rows in (3, 3, 1):
        before, plan = twin_of(pool), Tree(rows, rows).step()
        got = runner.forward(plan, pool).logits
        assert torch.equal(got, eager(runner, plan, before))

    (warning,) = caplog.messages
    assert warning.endswith("operation not permitted") and recorder.tried == 1
    assert graphs_of(runner).device_bytes == 0


# Buckets and padding


def level(requests: list[tuple[int, list[int]]], *, causal: bool) -> CascadeLevel:
    """A level from (rows, slots) per request."""
    rows = np.cumsum([0, *(count for count, _ in requests)]).astype(np.int32)
    ends = np.cumsum([0, *(len(slots) for _, slots in requests)]).astype(np.int32)
    slots = np.array([slot for _, several in requests for slot in several], np.int32)
    return CascadeLevel(*map(torch.from_numpy, (rows, ends, slots)), causal)


def last_level(rows: int) -> CascadeLevel:
    return level([(1, [row]) for row in range(rows)], causal=True)


def test_a_padded_layout_gives_the_same_attention() -> None:
    """Requests without rows among them; the rows added read the trash slot alone."""
    layout = CascadeLayout(
        5,
        (
            level([(2, [3, 4]), (3, [])], causal=False),
            level([(1, []), (3, [5, 6, 7]), (1, [8])], causal=False),
            last_level(5),
        ),
    )
    bucket, trash = Bucket(8, 3, 6), 20
    *shared, last = layout.levels
    padded = CascadeLayout(
        8, (*(pad_shared(each, bucket) for each in shared), pad_last(last, bucket, trash))
    )
    assert [len(each.qo_indptr) - 1 for each in padded.levels] == [6, 6, 8]
    assert padded.levels[0].qo_indptr.tolist() == [0, 2, 5, 8, 8, 8, 8]
    assert padded.levels[2].kv_indices[5:].tolist() == [trash] * 3

    shape = AttentionShape(4, 2, 8, 8, 0.3)
    torch.manual_seed(0)
    q, k, v = torch.randn(8, 4, 8), torch.randn(21, 2, 8), torch.randn(21, 2, 8)
    reference = RowwiseAttention()
    wanted = reference.run(reference.plan(layout, shape), q[:5], k, v)
    got = reference.run(reference.plan(padded, shape), q, k, v)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine[:5], theirs)
    torch.testing.assert_close(got[0][5:], v[trash].repeat_interleave(2, 0).expand(3, 4, 8))


def test_a_launch_is_what_flashinfer_plans_for_any_rows_and_keys() -> None:
    random = np.random.default_rng(0)
    splits = 0
    for _ in range(2000):
        kv_heads, group = int(random.integers(1, 33)), int(random.integers(1, 17))
        dim = int(random.choice([64, 128, 256]))
        shape = AttentionShape(kv_heads * group, kv_heads, dim, dim, 1.0)
        rows = int(random.choice(ROWS))
        requests = int(random.integers(1, rows + 1))
        cuts = np.sort(random.integers(0, rows + 1, requests - 1))
        keys = random.integers(0, random.choice([2, 300, 30_000]), requests)
        needed = demand(
            [0, *cuts.tolist(), rows],
            [0, *np.cumsum(keys).tolist()],
            shape.num_qo_heads,
            kv_heads,
            dim,
            graph_rows=rows,
        )
        launch = launch_of(shape, rows, requests, MULTIPROCESSORS)

        assert (launch.tile, launch.pieces) == (needed.tile, needed.pieces)
        assert launch.float_bytes == needed.float_bytes
        assert needed.int_bytes <= launch.int_bytes < needed.int_bytes + 512
        splits += needed.split
    assert splits == 2000
