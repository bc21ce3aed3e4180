"""Scorers of keys, values and queries, against direct formulas and Hugging Face's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.models import build
from support.policies import POLICIES
from support.trees import GREEDY, PROMPT, Lab
from torch import Tensor

from arbor.engine.query_window import QueryWindow, last_of_each
from arbor.errors import ModelError, UsageError
from arbor.events import Evicted
from arbor.model.plan import ForwardPlan
from arbor.model.runner import ModelRunner
from arbor.papers.related.expected_attention import ExpectedAttention
from arbor.papers.related.keydiff import KeyDiff
from arbor.papers.related.rkv import RKV
from arbor.papers.related.triattention import TriAttention
from arbor.papers.related.vatp import VATP
from arbor.papers.related.window_attention import WindowAttention
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Tokens
from arbor.retention.observation import Observation
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import KVScorer, KVSequence, PairRotation, attention_of, neighbours
from arbor.testing import random_kv
from arbor.tree import Node, ThoughtTree

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


def test_queries_of_the_first_positions_are_not_expected_again() -> None:
    given = sequence(2)
    early = dataclasses.replace(given, asked=np.arange(4))
    norm = given.values(1).norm(dim=-1).mean(-1)
    found = ExpectedAttention(epsilon=0.5).of(early, 1)
    assert found[4:].tolist() == pytest.approx((norm[4:] / 2).tolist())


def test_without_queries_no_coming_ones_are_known() -> None:
    given = sequence(2)
    none = {"asked": np.empty(0, np.int64), "queries": lambda layer: given.queries(layer)[:0]}
    blind = dataclasses.replace(given, **none)
    assert not ExpectedAttention().of(blind, 1)[4:].any()
    assert not TriAttention().of(blind, 1).any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_is_undone_and_averaged(interleaved: bool) -> None:
    frequencies = torch.tensor([0.7, 0.02], dtype=torch.float64)
    rotation = PairRotation(interleaved, frequencies, 1.5)
    plain = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    at = [5, 90, 1000]
    encoded = torch.stack([rotation.mean(x, np.array([p])) for x, p in zip(plain, at, strict=True)])

    assert torch.allclose(rotation.undone(encoded, np.array(at)), plain, atol=1e-5)
    assert torch.equal(encoded[..., 4:], plain[..., 4:])  # the rest is not turned
    both = (rotation.mean(plain, np.array([3])) + rotation.mean(plain, np.array([8]))) / 2
    assert torch.allclose(rotation.mean(plain, np.array([3, 8])), both, atol=1e-6)


def test_of_alike_keys_the_newest_is_not_redundant() -> None:
    alike = torch.tensor([1.0, 0, 0, 0])
    keys = torch.eye(4)[[1, 0, 2, 0, 3]][:, None]
    assert (keys[[1, 3], 0] == alike).all()

    redundant = RKV().redundancy(keys)[0]

    # the older copy counts for the newer one's row and not the other way round: each row leaves
    # out its most recent similar token
    assert redundant.tolist() == [0, 0, 0, 0, 0]
    third = torch.cat([keys, keys[1:2]])
    # rows of the copies at 1 and 3 leave out the one at 5, whose own row leaves out that at 3
    assert RKV().redundancy(third)[0].tolist() == pytest.approx([0, 2 / 6, 0, 1 / 6, 0, 0])


def test_keys_that_are_compared_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(40, 3, 8, generator=generator)
    whole = RKV().redundancy(keys)
    monkeypatch.setattr("arbor.papers.related.rkv._PIECE", 7)
    assert RKV().redundancy(keys).flatten().tolist() == pytest.approx(
        whole.flatten().tolist(), rel=1e-6, abs=1e-8
    )


def test_attention_is_zero_where_nothing_is_seen() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf] * 3])
    assert attention_of(logits).tolist() == [[0.5, 0.5, 0], [0, 0, 0]]


def test_neighbours_beyond_the_ends_have_the_value_given() -> None:
    assert neighbours(torch.tensor([1.0, 2.0]), 3, 9.0).tolist() == [[9, 1, 2], [1, 2, 9]]


def test_without_queries_importance_is_zero() -> None:
    given = sequence(1)
    blind = dataclasses.replace(
        given,
        logits=lambda layer: [],
        recent=np.zeros(len(given), np.bool_),
    )
    assert not WindowAttention().of(blind, 1).any()
    redundant = RKV().redundancy(given.keys(1)).softmax(-1).mean(0)
    assert RKV(mix=0.5).of(blind, 1).tolist() == pytest.approx((-redundant / 2).tolist())


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


def test_a_token_of_unknown_value_is_below_all_others() -> None:
    kv = dataclasses.replace(random_kv(3, 5), place=np.array([2, -1, 0]))
    tokens = Tokens.when_read({}, mass=np.array([0.5, 9.0, 0.1]), kv=kv)
    assert VATP().scores(tokens)[1] == -1
    assert (VATP().scores(tokens)[[0, 2]] > 0).all()


# The column


def test_a_token_that_is_not_on_the_device_scores_below_all_others() -> None:
    kv = random_kv(3, 5)
    some = dataclasses.replace(kv, place=np.array([2, -1, 0]))

    first, gone, last = some.scores(KeyDiff())

    every = [KeyDiff().of(kv.sequences[0], layer).numpy() for layer in (1, 3)]
    assert [first, last] == pytest.approx(np.mean(every, axis=0)[[2, 0]])
    assert gone == pytest.approx(np.mean(every, axis=0).min() - 1)
    assert some[np.array([1])].place.tolist() == [-1]  # type: ignore[union-attr]
    assert len(some) == 3


def test_observed_layers_are_one_of_four_unless_others_are_named() -> None:
    assert Observation().layers_of(12) == (3, 7, 11)
    assert Observation(every=1).layers_of(3) == (0, 1, 2)
    assert Observation(layers=(5, 0, 9)).layers_of(6) == (0, 5)
    assert [Observation(keys=True).anything, Observation(window=1).anything] == [False, True]


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


def test_chosen_heads_and_layers_are_a_part_of_all() -> None:
    seen = []
    for wanted in ({"every": 1}, {"layers": (1,), "heads": (1,)}):
        policy = watching(3, **wanted)
        lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off")
        tree = lab.plant(100)
        (block,) = lab.sprout([(tree.root, 1)], GREEDY, 9)
        found, _ = shown(lab, [block])
        seen.append((found.keys(1), found.values(1), every(found.logits(1))))
        layers = found.layers

    (keys, values, logits), (one_key, one_value, few) = seen
    assert layers == (1,)
    assert (one_key == keys[:, 1:]).all() and (one_value == values[:, 1:]).all()
    assert torch.allclose(few, logits[:, 2:])


@pytest.mark.parametrize(
    "name",
    ["llama", "llama_yarn", "qwen3", "gemma3_text", "gpt_oss", "phi3", "cohere", "glm", "olmo2"],
)
def test_rotations_are_found_and_take_queries_to_other_positions(name: str) -> None:
    """A query at a position, undone and encoded for another one, is the model's there."""
    seen = []
    for start in (0, 5):
        lab = Lab(build(name), policy=watching(1, every=1, rotation=True), mode="lossy")
        tree = lab.plant(64, prompt=[9] * start + [7])
        found, _ = shown(lab, [tree.root])
        # of the first layer, where a query depends on its token alone
        seen.append((found.rotation(0), found.queries(0)))

    (rotation, query), (_, later) = seen
    moved = rotation.mean(rotation.undone(query, np.array([0])), np.array([5]))
    assert torch.allclose(moved, later, atol=1e-4)
    assert len(rotation.frequencies) > 0
    assert not torch.allclose(query, later, atol=1e-2)


def test_layers_that_encode_no_positions_turn_nothing() -> None:
    lab = Lab(build("smollm3"), policy=watching(1, every=1, rotation=True), mode="lossy")
    counts = [len(each.frequencies) for each in lab.runner.rotations(range(3)).values() if each]
    assert counts == [4, 0, 4]


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3", "hunyuan_v1_dense"])
def test_encodings_of_other_kinds_are_not_taken_for_rotations(name: str) -> None:
    """Learned positions; parts of heads that are joined; norms after the rotation."""
    runner = Lab(build(name), policy="lru").runner
    assert set(runner.rotations(range(runner.layer_count)).values()) == {None}


def test_an_encoding_that_is_not_a_rotation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(build("llama"), policy="expected", mode="lossy")
    monkeypatch.setattr(lab.runner, "rotations", lambda layers: dict.fromkeys(layers))
    with pytest.raises(ModelError, match=r"layer 2 is not a rotation"):
        lab.plant()


def test_8_bit_keys_are_decoded() -> None:
    keys = []
    for dtype in (None, torch.int8):
        lab = Lab(build("llama"), policy="keydiff", mode="lossy", rehydrate="off")
        lab.runner.kv_dtype = dtype or lab.runner.dtype
        tree = lab.plant(100)
        found, _ = shown(lab, [tree.root])
        keys.append(found.keys(0))
    assert keys[0].shape == keys[1].shape
    assert torch.allclose(keys[0], keys[1], atol=0.05)
    assert not torch.equal(keys[0], keys[1])


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


def test_logits_made_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(build("llama"), policy=watching(5, every=1), mode="lossy", rehydrate="off")
    tree = lab.plant(400)
    leaves = lab.sprout([(tree.root, 3)], GREEDY, 7)
    found, _ = shown(lab, leaves)
    whole = list(found.logits(1))
    monkeypatch.setattr("arbor.engine.kv_view.PIECE", 4 * len(found) * 4)
    pieces = list(found.logits(1))
    assert [len(whole), len(pieces)] == [1, 4]
    assert torch.equal(every(pieces), whole[0])


def test_a_path_that_runs_alone_counts_its_last_queries_only() -> None:
    """Though the ring has room for those of several paths."""
    lab = Lab(build("llama"), policy=watching(3, every=1), mode="lossy", rehydrate="off")
    tree = lab.plant(400)
    first, *_ = lab.sprout([(tree.root, 4)], GREEDY, 5)
    (last,) = lab.sprout([(first, 1)], GREEDY, 4)

    found, tokens = shown(lab, [last])

    assert tokens.kv.place is not None
    owner = np.zeros(len(found), np.int64)
    owner[tokens.kv.place] = tokens.block
    recent = [(int(owner[at]), int(found.positions[at])) for at in np.flatnonzero(found.recent)]
    assert recent == [(last.id, last.end - back) for back in (3, 2, 1)]
    both, _ = shown(lab, [last, tree[2]])
    assert both.recent.sum() == 3 + 2  # of the other leaf's last three, the ring still has two
    seen = (every(found.logits(0))[:, 0] > -torch.inf).sum(0).numpy()
    assert (seen <= 3).all() and (seen[owner == 0] == 3).all()


@pytest.mark.parametrize("heads", [None, (1,)])
def test_attention_of_chosen_heads_sums_to_one_for_each_query(heads: tuple[int, ...]) -> None:
    lab = Lab(build("llama"), policy=watching(0, True, heads=heads), mode="lossy")
    tree = lab.plant(100)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 9)
    _, tokens = shown(lab, [block])
    assert tokens.mass.sum() == pytest.approx(len(PROMPT) + 9, rel=1e-4)


def test_what_is_computed_again_and_questions_leave_no_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), policy=watching(4, every=1), debug=True)
    plans: list[ForwardPlan] = []
    right = ModelRunner.forward

    def forward(self: ModelRunner, plan: ForwardPlan, *args: Any, **kwargs: Any) -> Any:
        plans.append(plan)
        return right(self, plan, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    tree = lab.plant()
    first, second = lab.sprout([(tree.root, 2)], GREEDY)
    found, _ = shown(lab, [first, second])
    assert len(found.asked) == 8

    lab.ask([first], [[7, 8, 9] * 3])
    lab.memory.evict(tree.root, np.arange(6, 10))
    lab.memory.release([first])
    lab.state.changed([tree.root, first])
    lab.extend(first)

    assert first.span.resident.all()
    again, _ = shown(lab, [first, second])
    assert torch.equal(again.queries(1), found.queries(1))
    # a forward in which some rows run again
    plan = plans[0]
    plan.table.again[-2:] = True
    rows = lab._parts.forwards.observer.asked(plan)["queries"][1]
    assert rows.tolist() == [8, 9]


def test_a_tree_that_is_closed_next_to_others_leaves_no_queries_to_its_rows() -> None:
    lab = Lab(build("llama"), policy=watching(16, every=1), mode="lossy")
    first = ThoughtTree(PROMPT)
    lab.open(first, 300, pool=600)
    lab.extend(first.root)
    second = ThoughtTree(PROMPT[:6])
    lab.open(second, 300, alone=False)
    lab.extend(second.root)
    lab.close(first)
    third = ThoughtTree(PROMPT[:4])
    lab.open(third, 300, alone=False)
    lab.extend(third.root)

    kv = lab.residency.view.offered([third.root, second.root], where="anywhere").tokens.kv

    assert third.root.row == 0
    assert [each.asked.tolist() for each in kv.sequences] == [list(range(6)), list(range(4))]
    assert kv.place is not None and sorted(kv.place.tolist()) == list(range(10))


def test_the_queries_of_a_path_are_not_displaced_by_those_of_another_search() -> None:
    lab = Lab(build("llama"), policy=watching(4, every=1), mode="lossy", debug=True)
    first = ThoughtTree(PROMPT)
    lab.open(first, 300, pool=900)
    lab.extend(first.root)
    for seed in range(2):  # each of 4 queries, in one forward
        other = ThoughtTree((seed, *PROMPT))
        lab.open(other, 300, alone=False)
        lab.extend(other.root)

    kv = lab.residency.view.offered([first.root], where="anywhere", tree=first).tokens.kv

    (mine,) = kv.sequences  # nothing of the others is looked at
    assert mine.asked.tolist() == list(range(len(PROMPT) - 4, len(PROMPT)))


def test_tokens_without_written_keys_are_left_out() -> None:
    lab = Lab(build("llama"), policy=watching(3), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(100)
    lab.memory.evict(tree.root, np.arange(4, 7))
    lab.memory.place(tree.root, np.arange(4, 6), exact=False, depth=3)

    found, _ = shown(lab, [tree.root])

    assert found.positions.tolist() == [*range(4), *range(7, len(PROMPT))]
    lab.memory.rollback()


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


@pytest.mark.parametrize("policy", ["keydiff", "vatp", "rkv", "rpc", "expected", "triattention"])
def test_long_blocks_run_in_small_budgets(policy: str) -> None:
    protect = Protect(sinks=2, recent=4)
    lab = Lab(
        build("llama"),
        policy=dataclasses.replace(POLICIES[policy], protect=protect),
        mode="lossy",
        rehydrate="off",
        debug=True,
    )
    tree = lab.plant(24)
    blocks = lab.sprout([(tree.root, 2)], GREEDY, LONG)

    assert [len(block.tokens) for block in blocks] == [LONG, LONG]
    assert any(isinstance(event, Evicted) for event in lab.events)
    assert tree.root.span.resident[:2].all()


def test_a_closed_tree_leaves_no_queries_to_the_next_one() -> None:
    lab = Lab(build("llama"), policy=watching(8), mode="lossy", rehydrate="off")
    tree = lab.plant(100)
    lab.sprout([(tree.root, 1)], GREEDY, 9)
    again = lab.plant(100)

    found, _ = shown(lab, [again.root])

    assert every(found.logits(2)).shape[0] == 8
    assert found.recent.tolist() == [False] * 4 + [True] * 8


def queries(*values: float) -> dict[int, Tensor]:
    return {0: torch.tensor(values).view(-1, 1, 1)}


def test_the_ring_keeps_the_last_queries_of_every_path() -> None:
    ring = QueryWindow(2, [0])
    ring.add(np.array([5, 6]), np.array([1, 1]), queries(1, 2), paths=2)
    ring.add(np.array([5, 6]), np.array([2, 2]), queries(3, 4), paths=2)
    ring.add(np.array([5, 6]), np.array([3, 3]), queries(5, 6), paths=2)
    assert sorted(zip(ring.row.tolist(), ring.position.tolist(), strict=True)) == [
        *((5, 2), (5, 3), (6, 2), (6, 3))
    ]
    assert ring.queries(0, np.argsort(ring.age)).flatten().tolist() == [3, 4, 5, 6]

    ring.add(np.array([7]), np.array([0]), queries(7), paths=3)  # grows, and keeps what it has
    by_age = np.argsort(ring.age)[-5:]
    assert ring.row[by_age].tolist() == [5, 6, 5, 6, 7]
    assert ring.queries(0, by_age).flatten().tolist() == [3, 4, 5, 6, 7]


def test_of_a_segment_the_last_rows_are_kept() -> None:
    new = np.array([True, True, True, True, False, True])
    assert last_of_each(np.array([4, 2]), new, 2).tolist() == [2, 3, 5]
