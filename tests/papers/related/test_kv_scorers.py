"""Scorers of keys, values and queries, against direct formulas and Hugging Face's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.models import build
from support.trees import GREEDY, PROMPT, Lab
from torch import Tensor

from arbor.errors import UsageError
from arbor.model.runner import ModelRunner
from arbor.papers.related.expected_attention import ExpectedAttention
from arbor.papers.related.keys_values import VATP, KeyDiff
from arbor.papers.related.rkv import RKV
from arbor.papers.related.snapkv_budgets import Chunks
from arbor.papers.related.triattention import TriAttention
from arbor.papers.related.window_attention import WindowAttention
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Tokens
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import KVScorer, KVSequence, Observation, attention_of
from arbor.testing import random_kv
from arbor.tree import Node

LONG = 40


def every(pieces: Iterable[Tensor]) -> Tensor:
    """Logits of all queries, the oldest first."""
    return torch.cat(list(pieces)[::-1])


def sequence(seed: int, count: int = 30) -> KVSequence:
    """Random keys, values and logits of tokens, the last two of which are the window's."""
    return random_kv(seed, count - 3).sequences[0]


# Formulas


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("seed", range(3))
def test_keydiff_is_the_cosine_to_the_mean_of_unit_keys(seed: int) -> None:
    given = sequence(seed)
    keys = given.keys(1).double().numpy()
    wanted = []
    for token in keys:
        heads = []
        for head, key in enumerate(token):
            mean = np.mean([each[head] / np.linalg.norm(each[head]) for each in keys], axis=0)
            heads.append(-cosine(key, mean))
        wanted.append(np.mean(heads))

    assert KeyDiff().of(given, 1).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_vatp_is_attention_times_the_l1_norm_of_the_value(seed: int) -> None:
    kv = random_kv(seed, 20)
    mass = np.random.default_rng(seed).random(20)
    tokens = Tokens.when_read({}, mass=mass, kv=kv)
    assert kv.place is not None
    norms = [
        np.mean([np.abs(kv.sequences[0].values(layer)[place].numpy()).sum(-1).mean()])
        for place in kv.place
        for layer in (1, 3)
    ]
    wanted = mass * np.array(norms).reshape(-1, 2).mean(1)

    assert VATP().scores(tokens) == pytest.approx(wanted, rel=1e-5)


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits - logits.max())
    return np.asarray(weight / weight.sum())


@pytest.mark.parametrize(("window", "pool"), [(4, 1), (4, 5)])
def test_window_attention_is_snapkv_s_formula(window: int, pool: int) -> None:
    given = sequence(5)
    logits = every(given.logits(3)).double().numpy()  # [w, H, n]
    old = np.flatnonzero(~given.recent)
    count, heads = len(old), logits.shape[1]
    wanted = np.zeros(count)
    for head in range(heads):
        each = [softmax(logits[query, head])[old] for query in range(len(logits))]
        seen = [np.isfinite(logits[query, head][old]) for query in range(len(logits))]
        mean = np.sum(each, axis=0) / np.sum(seen, axis=0)
        for at in range(count):
            near = mean[max(0, at - pool // 2) : at + pool // 2 + 1]
            wanted[at] += near.sum() / pool / heads

    found = WindowAttention(window, pool).of(given, 3).numpy()

    assert found[old] == pytest.approx(wanted, abs=1e-6)
    assert (found[given.recent] > found[old].max() + 0.5).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mix", [0.0, 0.1, 1.0])
def test_rkv_is_importance_less_redundancy(seed: int, mix: float) -> None:
    given = sequence(seed)
    scorer = RKV(mix=mix, window=4, pooled=3)
    keys = given.keys(1).double().numpy()
    logits = every(given.logits(1)).double().numpy()
    count, heads = keys.shape[:2]
    old = np.flatnonzero(~given.recent)
    scores = np.zeros((heads, count))
    for head in range(heads):
        similar = np.array([[cosine(a[head], b[head]) for b in keys] for a in keys])
        np.fill_diagonal(similar, 0)
        for row in similar:
            alike = np.flatnonzero(row > scorer.alike)
            if len(alike):
                row[alike[-1]] = 0
        redundant = softmax(similar.mean(0))
        largest = logits[:, 2 * head : 2 * head + 2].max(1)[:, old]
        each = [softmax(row) for row in largest]
        mean = np.sum(each, axis=0) / np.isfinite(largest).sum(0)
        pooled = [mean[max(0, at - 1) : at + 2].max() for at in range(len(old))]
        scores[head, old] = mix * np.array(pooled) - (1 - mix) * redundant[old]

    found = scorer.of(given, 1).numpy()

    assert found[old] == pytest.approx(scores.mean(0)[old], abs=1e-6)
    assert (found[given.recent] > found[old].max() + 0.5).all()


def rotated(x: np.ndarray, given: KVSequence, positions: np.ndarray) -> np.ndarray:
    """Heads [..., D] encoded for a position each, by halves."""
    rotation = given.rotation(1)
    angle = positions[..., None] * rotation.frequencies.numpy()
    count = len(rotation.frequencies)
    pair = (x[..., :count] + 1j * x[..., count:]) * np.exp(1j * angle) * rotation.scale
    return np.concatenate([pair.real, pair.imag], axis=-1)


def plain_queries(given: KVSequence) -> np.ndarray:
    """[w, H_q, D], before position encoding."""
    scale = given.rotation(1).scale
    encoded = given.queries(1).double().numpy()
    return rotated(encoded, given, -given.asked[:, None]) / scale**2


@pytest.mark.parametrize("covariance", [True, False])
def test_expected_attention_is_kvpress_s_formula_at_logical_positions(covariance: bool) -> None:
    given = sequence(2)
    queries = plain_queries(given)
    keys, values = given.keys(1).double().numpy(), given.values(1).double().numpy()
    dim, scaling = keys.shape[-1], given.scaling(1)
    eye = np.eye(dim)
    turns = [  # a matrix for each position to come
        rotated(eye, given, np.full(dim, given.asked.max() + step)).T for step in range(1, 21)
    ]
    turn = np.mean(turns, axis=0)
    heads = []
    for head in range(queries.shape[1]):
        mean = turn @ queries[:, head].mean(0)
        spread = turn @ np.cov(queries[:, head].T, bias=True) @ turn.T
        key = keys[:, head // 2]
        logits = key @ mean * scaling
        if covariance:
            logits += np.einsum("ni,ij,nj->n", key, spread, key) * scaling**2 / 2
        norm = np.linalg.norm(values[4:, head // 2], axis=-1)
        heads.append((softmax(logits[4:]) + 0.01) * norm)  # without sinks
    scorer = ExpectedAttention(20, covariance=covariance, epsilon=0.01)

    found = scorer.of(given, 1).numpy()

    assert found[4:] == pytest.approx(np.mean(heads, axis=0), rel=1e-4)
    assert (found[:4] > found[4:].max() + 0.5).all()


def test_triattention_is_the_sum_over_pairs_and_distances() -> None:
    given = sequence(4)
    rotation, last = given.rotation(1), int(given.asked.max())
    count = len(rotation.frequencies)

    def pairs(x: np.ndarray) -> np.ndarray:
        return np.asarray(x[..., :count] + 1j * x[..., count:])

    queries = pairs(plain_queries(given))
    encoded = given.keys(1).double().numpy()
    keys = pairs(rotated(encoded, given, -given.positions[:, None]) / rotation.scale**2)
    omega = rotation.frequencies.numpy()
    distances = [1, 2, 4, 8, 16]
    wanted = np.zeros(len(keys))
    for head in range(queries.shape[1]):
        mean, size = queries[:, head].mean(0), np.abs(queries[:, head]).mean(0)
        for place, key in enumerate(keys[:, head // 2]):
            phase = np.angle(mean * key.conj())
            since = last - given.positions[place]
            terms = [
                np.sum(np.abs(mean) * np.abs(key) * np.cos((since + step) * omega + phase))
                for step in distances
            ]
            extra = np.sum((size - np.abs(mean)) * np.abs(key))
            wanted[place] += (np.mean(terms) + extra) * rotation.scale**2
    wanted /= queries.shape[1]

    found = TriAttention(farthest=16).of(given, 1).numpy()

    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert TriAttention(farthest=31).of(given, 1).numpy() == pytest.approx(found)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (RKV, {"mix": 1.5}),
        (RKV, {"window": 0}),
        (RKV, {"pooled": 4}),
        (ExpectedAttention, {"ahead": 0}),
        (ExpectedAttention, {"window": 0}),
        (ExpectedAttention, {"epsilon": -0.1}),
        (TriAttention, {"farthest": 0}),
        (TriAttention, {"window": 0}),
        (WindowAttention, {"window": 0}),
        (WindowAttention, {"pooled": 0}),
    ],
)
def test_settings_are_checked(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="it must be"):
        kind(**settings)


# The column


# Engines


@dataclasses.dataclass(frozen=True)
class Watching(KVScorer):
    """Keeps a window of queries and values all tokens alike."""

    window: int
    observation_of: Observation
    observes: bool = False

    @property
    def observation(self) -> Observation:
        return dataclasses.replace(self.observation_of, keys=True, window=self.window)

    def of(self, sequence: KVSequence, layer: int) -> Tensor:
        return sequence.keys(layer).new_zeros(len(sequence))


def watching(window: int, observes: bool = False, **observation: Any) -> Policy:
    scorer = Watching(window, Observation(**observation), observes)
    return Policy(Pooled(), scorer, Protect(2, 2))


def shown(lab: Lab, leaves: Sequence[Node]) -> tuple[KVSequence, Tokens]:
    tokens = lab.residency.view.offered(leaves, where="anywhere").tokens
    (only,) = tokens.kv.sequences
    return only, tokens


@torch.inference_mode()
def own_attention(name: str, node: Node, layer: int) -> Tensor:
    """Hugging Face's attention over the path to a block, [H, n, n]."""
    model = build(name)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[token for each in node.path for token in each.tokens]])
    attention: Tensor = model(ids, output_attentions=True, use_cache=False).attentions[layer][0]
    return attention


@pytest.mark.parametrize(
    "name", ["llama", "llama_gqa4", "qwen3", "mistral_window", "gemma2", "llama_yarn"]
)
def test_logits_of_the_window_are_those_of_the_model(name: str) -> None:
    lab = Lab(build(name), policy=watching(6, every=1), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(200)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)

    found, tokens = shown(lab, [block])

    count = len(PROMPT) + LONG
    assert found.positions.tolist() == list(range(count))
    assert found.layers == tuple(range(lab.runner.layer_count))
    assert np.flatnonzero(found.recent).tolist() == list(range(count - 6, count))
    assert tokens.kv.place is not None
    assert found.positions[tokens.kv.place].tolist() == tokens.position.tolist()
    for layer in found.layers:
        wanted = own_attention(name, block, layer)[:, -6:].transpose(0, 1)
        assert torch.allclose(attention_of(every(found.logits(layer))), wanted, atol=1e-5)


@pytest.mark.parametrize("observed", ["one", "quarter", "all"])
def test_layers_observed_are_a_setting(observed: Any) -> None:
    policy = dataclasses.replace(watching(6, observes=True), observed=observed)
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    count = lab.runner.layer_count
    layers = {"one": [count - 1], "quarter": [*range(3, count, 4)] or [count - 1]}
    tree = lab.plant(200)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)

    found, tokens = shown(lab, [block])

    assert list(found.layers) == layers.get(observed, [*range(count)])
    of_layers = [own_attention("llama", block, layer) for layer in found.layers]
    received = torch.stack(of_layers).mean((0, 1)).sum(0).double().numpy()
    assert tokens.mass == pytest.approx(received[: len(tokens.mass)], rel=1e-3)


def test_each_token_of_a_tree_counts_the_last_queries_below_it() -> None:
    """The reference keeps every query with the attention it gave."""
    window = 7
    lab = Lab(build("llama"), policy=watching(window, every=1), mode="lossy", rehydrate="off")
    tree = lab.plant(400)
    first, second = lab.sprout([(tree.root, 2)], GREEDY, 5)
    lab.sprout([(first, 2), (second, 1)], length=4)

    found, tokens = shown(lab, [tree[3], tree[4], tree[5]])

    assert (np.diff(found.positions) >= 0).all()
    logits = every(found.logits(0))
    seen = (logits[:, 0] > -torch.inf).numpy()
    assert tokens.kv.place is not None
    named = dict(
        zip(
            tokens.kv.place.tolist(),
            zip(tokens.block.tolist(), tokens.position.tolist(), strict=True),
            strict=True,
        )
    )
    # a query of a leaf at a position sees the tokens of its path up to it
    below: dict[int, int] = {}
    for place, (block, position) in named.items():
        node = tree[block]
        under = [each for each in tree if node in each.path and each.end > position]
        total = sum(each.end - max(each.start, position) for each in under)
        below[place] = min(total, window)
    # the ring holds the last queries of three paths at least: more than a token needs
    assert {place: int(seen[:, place].sum()) for place in named} == below

    probabilities = attention_of(logits).numpy()
    leaf = tree[5]
    own = [place for place, (block, _) in named.items() if tree[block] in leaf.path]
    own.sort(key=lambda place: named[place][1])
    newest = int(np.flatnonzero(seen[:, own[-1]])[-1])
    wanted = own_attention("llama", leaf, 0)[:, -1]
    assert probabilities[newest][:, own] == pytest.approx(wanted.numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        ("lru", set()),
        ("keydiff", set()),
        ("h2o", {"mass"}),
        ("vatp", {"mass"}),
        ("rkv", {"queries"}),
    ],
)
def test_nothing_is_collected_that_the_policy_does_not_want(
    policy: str, asked: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(build("llama"), policy=policy, mode="lossy")
    found: set[str] = set()
    right = ModelRunner.forward

    def forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        found.update(kwargs)
        return right(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    tree = lab.plant()
    lab.sprout([(tree.root, 2)], GREEDY)
    assert found == asked


def queries(*values: float) -> dict[int, Tensor]:
    return {0: torch.tensor(values).view(-1, 1, 1)}


def test_a_chunk_of_no_token_is_refused() -> None:
    with pytest.raises(UsageError, match="it must be"):
        Chunks(size=0)
