"""Stopping after a layer, rows that leave between layers, hidden states, attention mass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.models import (
    ARCHITECTURES,
    VOCABULARY,
    build,
    config_of,
    copy_of,
    random_model,
)
from support.slow_cases import every
from support.trees import PROMPT, leaves_of, path_ids, relative_error
from torch import Tensor, nn

from arbor.kernels.attention.base import ObservingBackend
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.native import native_library
from arbor.memory.pool import KVPool
from arbor.model.plan import ForwardPlan, Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.tree import Node, ThoughtTree

NAMES = ("llama", "qwen3", "mistral_window", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox")
TOLERANCE = 2e-6


@functools.cache
def runner_of(name: str) -> ModelRunner:
    return ModelRunner(build(name), TorchCascade())


@functools.cache
def sample_tree() -> ThoughtTree:
    """A prompt, three branches, two of them branching again."""
    tree = ThoughtTree(PROMPT)
    random = np.random.default_rng(1)
    for parent, length in ((0, 4), (0, 6), (0, 3), (1, 5), (1, 2), (2, 4)):
        node = tree.fork(tree[parent])
        for token in random.integers(0, VOCABULARY, length):
            tree.append(node, int(token))
    return tree


@functools.cache
def block_rows() -> dict[int, np.ndarray]:
    """Block -> its rows in the batch: depth first, one after the other."""
    order = sorted(sample_tree(), key=lambda node: node.key)
    ends = np.cumsum([len(node.tokens) for node in order])
    return {
        node.id: np.arange(end - len(node.tokens), end, dtype=np.int32)
        for node, end in zip(order, ends, strict=True)
    }


def batch(runner: ModelRunner) -> tuple[ForwardPlan, KVPool]:
    """The whole tree as one batch, row i in slot i; the pool holds NaN until it is written."""
    tree, rows = sample_tree(), block_rows()
    segments = []
    order = [tree[node_id] for node_id in rows]
    for node in order:
        context = tuple(
            Piece(n.id, rows[n.id], np.arange(n.start, n.end, dtype=np.int32))
            for n in node.path[:-1]
        )
        own = rows[node.id]
        positions = np.arange(node.start, node.end)
        segments.append(Segment(context, node.tokens, positions, own, own, len(node.tokens)))
    pool = KVPool(runner.layer_kv, tree.tokens, runner.dtype, runner.device)
    pool.poison(np.arange(tree.tokens + 1, dtype=np.int32))
    return plan_forward(segments), pool


def truncated(name: str, layers: int) -> Any:
    """The architecture with its first layers only, as Hugging Face runs it."""
    model = build(name)
    count = model.config.num_hidden_layers
    for module in model.modules():
        for key, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                setattr(module, key, child[:layers])
    model.config.num_hidden_layers = layers
    return model


@torch.inference_mode()
def by_rows(model: Any, read: Any, **settings: Any) -> Tensor:
    """`read` of Hugging Face's output for each leaf's path ([n, ...]), in the batch's rows."""
    blocks: dict[int, Tensor] = {}
    for leaf in leaves_of(sample_tree()):
        values = read(model(torch.tensor([path_ids(leaf)]), use_cache=False, **settings))
        blocks |= {node.id: values[node.start : node.end] for node in leaf.path}
    return torch.cat([blocks[node_id] for node_id in block_rows()])


def logits_of(model: Any) -> Tensor:
    return by_rows(model, lambda output: output.logits[0])


def rows_of(blocks: Sequence[Node]) -> Tensor:
    return torch.from_numpy(np.concatenate([block_rows()[node.id] for node in blocks])).long()


@pytest.mark.parametrize("name", NAMES)
def test_stopping_after_a_layer_is_the_truncated_model(name: str) -> None:
    runner = runner_of(name)
    for last in range(runner.layer_count):
        plan, pool = batch(runner)

        result = runner.forward(plan, pool, stop_after=last)

        assert relative_error(result.logits, logits_of(truncated(name, last + 1))) < TOLERANCE
        assert result.exit_layer is None
        for layer in range(runner.layer_count):
            written = not pool.k[layer][:-1].isnan().any()
            assert written == (layer <= last)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_are_the_models_own(name: str) -> None:
    runner = runner_of(name)
    last = runner.layer_count - 1
    plan, pool = batch(runner)

    result = runner.forward(plan, pool, hidden=range(last + 1))

    own = build(name)
    assert sorted(result.hidden) == list(range(last + 1))
    for layer in range(last):
        want = by_rows(
            own, lambda o, at=layer + 1: o.hidden_states[at][0], output_hidden_states=True
        )
        assert relative_error(result.hidden[layer], want) < TOLERANCE
    # the last entry of the model's own list comes after the final norm
    norm = next(m for m in reversed(list(own.base_model.children())) if hasattr(m, "weight"))
    with torch.inference_mode():
        normed = norm(result.hidden[last])
    want = by_rows(own, lambda o: o.hidden_states[-1][0], output_hidden_states=True)
    assert relative_error(normed, want) < TOLERANCE


def leaving(rows_after: dict[int, Tensor], count: int) -> tuple[Any, list[tuple[int, int]]]:
    """A `leave` of these rows after these layers, and its calls: (layer, rows running)."""
    asked: list[tuple[int, int]] = []
    alive = torch.arange(count)

    def leave(layer: int, hidden: Tensor, rows: Tensor) -> Tensor | None:
        nonlocal alive
        assert torch.equal(rows, alive)
        asked.append((layer, hidden.shape[0]))
        if layer not in rows_after:
            return None
        gone = torch.isin(alive, rows_after[layer])
        alive = alive[~gone]
        return gone

    return leave, asked


@pytest.mark.parametrize("name", NAMES)
def test_rows_leave_with_the_truncated_models_logits_and_the_others_do_not_notice(
    name: str,
) -> None:
    runner, tree = runner_of(name), sample_tree()
    plan, pool = batch(runner)
    # a block leaves no later than its ancestors; the second branch's end leaves inside a block
    first = torch.cat([rows_of([tree[3]]), rows_of([tree[6]])[2:]])
    second = torch.cat([rows_of([tree[4], tree[5]]), rows_of([tree[6]])[:2]])
    leave, asked = leaving({0: first, 1: second}, plan.rows)

    result = runner.forward(plan, pool, leave=leave, hidden=(0, 2))

    assert asked == [(0, plan.rows), (1, plan.rows - len(first))]
    assert result.exit_layer is not None
    stayed = torch.ones(plan.rows, dtype=torch.bool)
    stayed[torch.cat([first, second])] = False
    for rows, layer in ((first, 0), (second, 1), (stayed.nonzero().squeeze(1), 2)):
        assert (result.exit_layer[rows] == layer).all()
        want = logits_of(truncated(name, layer + 1))
        assert relative_error(result.logits[rows], want[rows]) < TOLERANCE
        for deeper in range(layer + 1, runner.layer_count):
            assert pool.k[deeper][rows].isnan().all()
            assert pool.v[deeper][rows].isnan().all()
    assert torch.equal(result.hidden[2][first], result.hidden[0][first])


LAST_LEAVE = 2  # rows that leave after the first layer


def path_plan(runner: ModelRunner, rows: int) -> tuple[ForwardPlan, KVPool]:
    """One path of so many rows."""
    slots = np.arange(rows, dtype=np.int32)
    ids = list(range(3, rows + 3))
    segment = Segment((), ids, np.arange(rows), slots, slots, rows)
    return plan_forward([segment]), KVPool(runner.layer_kv, rows, runner.dtype, runner.device)


def last_leave(layer: int, hidden: Tensor, rows: Tensor) -> Tensor | None:
    """After the first layer, the last rows leave."""
    return torch.arange(hidden.shape[0]) >= hidden.shape[0] - LAST_LEAVE if layer == 0 else None


@pytest.mark.parametrize("name", every(3, sorted(set(ARCHITECTURES) - {"gemma3n_text"})))
def test_rows_may_leave_any_architecture_whose_layers_take_one_state(name: str) -> None:
    runner = ModelRunner(build(name), TorchCascade())
    whole = runner.forward(*path_plan(runner, 11)).logits[:-LAST_LEAVE]

    left = runner.forward(*path_plan(runner, 11), leave=last_leave).logits[:-LAST_LEAVE]

    assert relative_error(left, whole) < TOLERANCE


@pytest.mark.parametrize("heads", [None, [1]], ids=["all heads", "one head"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
def test_attention_mass_is_the_sum_of_the_models_own_attentions(
    name: str, heads: list[int] | None
) -> None:
    runner = runner_of(name)
    plan, pool = batch(runner)
    chosen = None if heads is None else torch.tensor(heads)

    result = runner.forward(plan, pool, mass={0: chosen, 2: chosen})

    want = torch.zeros(plan.rows)
    own = build(name)
    for node in sample_tree():
        with torch.inference_mode():
            attentions = own(
                torch.tensor([path_ids(node)]), use_cache=False, output_attentions=True
            ).attentions
        for layer in (0, 2):
            shape = runner.specs[layer].shape
            counted = range(shape.num_qo_heads)
            queries = [h for h in counted if heads is None or h // shape.group in heads]
            received = attentions[layer][0, queries, node.start :].sum((0, 1))
            want.index_add_(0, rows_of(node.path), received)
    assert result.mass is not None
    assert relative_error(result.mass[:-1].nan_to_num(), want) < 1e-6
    assert result.mass[-1] == 0


@pytest.mark.skipif(native_library() is None, reason="the library is not built")
@pytest.mark.parametrize("leaves", [False, True], ids=["all rows", "rows leave"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_mass_of_one_pass_is_that_of_two(name: str, leaves: bool) -> None:
    """The native backend counts along with the attention; rows that run again count nothing."""
    model_type, given = ARCHITECTURES[name]
    model = random_model(config_of(model_type, **{**given, "head_dim": 16}))
    found = []
    for backend in (TorchCascade(), NativeCascade()):
        runner = ModelRunner(copy_of(model), backend)
        plan, pool = batch(runner)
        plan.again = torch.arange(plan.rows) % 3 == 1
        for layer_kv in (*pool.k, *pool.v):  # others read what rows that leave do not write
            layer_kv.zero_()

        def leave(layer: int, hidden: Tensor, rows: Tensor) -> Tensor | None:
            return torch.arange(len(hidden)) % 4 == 2 if layer == 0 else None

        chosen = leave if leaves else None
        mass = runner.forward(plan, pool, mass={0: None, 2: torch.tensor([1])}, leave=chosen).mass
        assert mass is not None
        found.append(mass)

    assert isinstance(NativeCascade(), ObservingBackend)
    assert not isinstance(TorchCascade(), ObservingBackend)
    assert found[0].sum() > 10
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
