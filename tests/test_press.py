"""Presses of kvpress as scorers and policies: against stand-ins, and, where it is installed,
kvpress itself."""

from __future__ import annotations

import copy
import pickle
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support import presses
from support.models import build
from support.policies import POLICIES
from support.trees import GREEDY, PROMPT, Lab
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arbor import components
from arbor.errors import ArborError, UsageError
from arbor.papers.related.window_attention import WindowAttention
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import KVSequence, attention_of
from arbor.testing import check_policy, random_kv
from arbor.tree import Node

LONG = 40


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `kvpress` that holds the stand-ins."""
    package = ModuleType("kvpress")
    vars(package).update({name: each for name, each in vars(presses).items() if name[0] != "_"})
    monkeypatch.setitem(sys.modules, "kvpress", package)


def policy_of(text: str) -> Policy:
    made: Policy = components.build("policy", text)
    return made


def grown(policy: Policy, model: str = "llama", **given: Any) -> tuple[Lab, Node]:
    """A chain of one block, all of it on the device."""
    lab = Lab(build(model), policy=policy, mode="lossy", rehydrate="off", debug=True, **given)
    tree = lab.plant(200)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)
    return lab, block


def sequence_of(lab: Lab, block: Node) -> KVSequence:
    (only,) = lab.residency.view.offered([block], where="anywhere").tokens.kv.sequences
    return only


@pytest.mark.usefixtures("stand_ins")
def test_a_press_is_a_policy_with_its_settings() -> None:
    policy = policy_of("kvpress:NormPress,sign=2,sinks=1,granularity=head")
    assert policy.name == "kvpress:NormPress"
    assert policy.summary == "Small keys win. (kvpress)"
    assert (policy.scorer.sign, policy.protect.sinks, policy.by_head) == (2.0, 1, True)
    assert policy.observation.keys
    assert policy.observation.window == 0
    assert policy_of("kvpress:SnapKVPress,window_size=9").observation.window == 9


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    "text",
    ["kvpress:NormPress,sign=3", "h2o,scorer=kvpress:SnapKVPress", "kvpress:SnapKVPress,recent=2"],
)
def test_a_press_survives_a_trace_and_a_pickle(text: str) -> None:
    policy = policy_of(text)
    assert components.build("policy", components.spec_of(policy)) == policy
    assert copy.deepcopy(policy) == policy
    again = pickle.loads(pickle.dumps(policy.scorer))
    assert again == policy.scorer
    assert type(again) is type(policy.scorer)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("policy", "kvpress:NormPress,compression_ratio=0.75", "take --budget 0.25"),
        ("policy", "kvpress:NormPress,compression_ratio=1", "Leave it out."),
        ("policy", "kvpress:ProjectingPress", "AttributeError: .*'q_proj'.* such as SnapKVPress"),
        ("policy", "kvpress:FlatPress", r"shape \(1, 300\) instead of \(1, 2, 300\)"),
        ("policy", "kvpress:ChoosingPress", "does not rank tokens by one score each"),
        ("scorer", "kvpress:NoPress", "does not rank tokens by one score each"),
        ("controller", "kvpress:NormPress", "is a press of kvpress, not a controller"),
        ("policy", "kvpress:NormPress,sing=1", "Did you mean 'sign'"),
        ("policy", "kvpress:Missing", "cannot be imported: AttributeError"),
    ],
)
def test_what_cannot_score_is_refused_before_a_run(kind: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        components.build(kind, text)


@pytest.mark.usefixtures("stand_ins")
def test_a_press_outside_kvpress_is_found_by_what_it_derives_from() -> None:
    assert presses.NormPress.__module__ == "kvpress"

    class Mine(presses.NormPress):
        """My own."""

    module = sys.modules["kvpress"]
    monkey = ModuleType("mine")
    vars(monkey)["Mine"] = Mine
    Mine.__module__, Mine.__qualname__ = "mine", "Mine"
    sys.modules["mine"] = monkey
    try:
        policy = policy_of("mine:Mine,sign=4")
        assert policy.scorer.sign == 4
        assert components.build("policy", components.spec_of(policy)) == policy
    finally:
        del sys.modules["mine"]
    assert sys.modules["kvpress"] is module


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ["NormPress", "SnapKVPress"])
def test_press_policies_keep_the_rules(name: str) -> None:
    check_policy(policy_of(f"kvpress:{name}"))
    check_policy(policy_of(f"kvpress:{name},granularity=head"))


@pytest.mark.usefixtures("stand_ins")
def test_tokens_whose_scores_are_lowest_leave() -> None:
    policy = policy_of("kvpress:NormPress,sinks=0,recent=0")
    lab, block = grown(policy)
    found = sequence_of(lab, block)
    norms = sum(found.keys(layer).norm(dim=-1).mean(1) for layer in found.layers)
    assert isinstance(norms, Tensor)
    tokens = lab.residency.view.offered([block], where="anywhere").tokens
    scores = policy.scorer.scores(tokens)
    wanted = -norms.numpy()[tokens.kv.place] / len(found.layers)
    assert scores == pytest.approx(wanted, abs=1e-5)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("model", ["llama", "llama_gqa4", "gemma2"])
def test_the_press_s_attention_is_the_model_s(model: str) -> None:
    """Each query's row is the model's own, from its own position."""
    window = 6
    policy = policy_of(f"kvpress:SnapKVPress,window_size={window}")
    lab, block = grown(policy, model)
    found = sequence_of(lab, block)
    reference = build(model)
    reference.set_attn_implementation("eager")
    ids = torch.tensor([[token for each in block.path for token in each.tokens]])
    with torch.inference_mode():
        rows = reference(ids, output_attentions=True, use_cache=False).attentions
    for layer in found.layers:
        keys = found.keys(layer)
        given = rows[layer][0, :, -window:, :-window].mean(1)
        wanted = given.view(keys.shape[1], -1, given.shape[1]).mean(1)
        scores = policy.scorer.of_heads(found, layer)
        assert torch.allclose(scores[:, :-window], wanted, atol=1e-5)
        assert (scores[:, -window:] > scores[:, :-window].max()).all()


@pytest.mark.usefixtures("stand_ins")
def test_a_window_wider_than_the_text_is_narrowed() -> None:
    given = random_kv(1, 2).sequences[0]  # 5 tokens, 4 queries
    scorer = components.build("scorer", "kvpress:SnapKVPress", window_size=50)
    scores = scorer.of_heads(given, 1)
    pieces = list(given.logits(1))
    rows = torch.cat([attention_of(piece) for piece in pieces[::-1]])
    assert torch.allclose(scores[:, 0], rows[:, :, 0].mean(0).view(2, 2).mean(1))
    assert (scores[:, 1:] > scores[:, :1]).all()


@pytest.mark.usefixtures("stand_ins")
def test_without_queries_all_tokens_score_alike() -> None:
    scorer = components.build("scorer", "kvpress:SnapKVPress")
    keys = torch.randn(7, 2, 4)
    assert (scorer._scores(keys, keys, keys.new_zeros(0, 4, 7)) == 0).all()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("granularity", ["token", "head"])
def test_a_long_chain_runs_in_a_small_budget(granularity: str) -> None:
    policy = policy_of(f"kvpress:SnapKVPress,granularity={granularity},sinks=2,recent=4")
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(24)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)
    assert len(block.tokens) == LONG
    assert lab.memory.peak <= 24
    assert len(PROMPT) + LONG > 24


def test_attention_may_be_called_as_kvpress_s_patch_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kvpress wraps all attention functions when it is imported, and passes dropout by place."""
    wanted = grown(POLICIES["keydiff"])[1].tokens
    own = ALL_ATTENTION_FUNCTIONS["arbor_paged"]
    calls = []

    def patched(
        module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, **kwargs: Any
    ) -> Any:
        calls.append(dropout)
        return own(module, query, key, value, mask, dropout, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "arbor_paged", patched)
    assert grown(POLICIES["keydiff"])[1].tokens == wanted
    assert calls


# kvpress itself


def real(name: str, **settings: Any) -> Any:
    kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
    return getattr(kvpress, name)(**settings)


@pytest.mark.parametrize(
    "name",
    [
        "CURPress",
        "KeyDiffPress",
        "KnormPress",
        "LagKVPress",
        "SnapKVPress",
        "TOVAPress",
    ],
)
def test_scores_are_those_of_kvpress_after_a_prompt(name: str) -> None:
    """The press, asked by arbor, and asked with the model's own layer and hidden states."""
    settings = {"SnapKVPress": {"window_size": 6}, "LagKVPress": {"lag_size": 8}}.get(name, {})
    press = real(name, **settings)
    policy = policy_of(",".join([f"kvpress:{name}", *(f"{k}={v}" for k, v in settings.items())]))
    lab, block = grown(policy)
    found = sequence_of(lab, block)
    model = build("llama")
    seen: dict[int, Any] = {}
    for layer in found.layers:
        model.model.layers[layer].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, layer=layer: seen.update({layer: (module, kwargs)}),
            with_kwargs=True,
        )
    ids = torch.tensor([[token for each in block.path for token in each.tokens]])
    with torch.inference_mode():
        cache = model(ids).past_key_values
        for layer in found.layers:
            module, kwargs = seen[layer]
            keys, values = cache.layers[layer].keys, cache.layers[layer].values
            wanted = press.score(module, kwargs["hidden_states"], keys, values, None, kwargs)[0]
            scores = policy.scorer.of_heads(found, layer)
            assert torch.allclose(scores, wanted, atol=1e-5)


def test_arbor_s_window_is_kvpress_s() -> None:
    real("SnapKVPress")
    policy = policy_of("kvpress:SnapKVPress,window_size=6,kernel_size=5")
    lab, block = grown(policy)
    found = sequence_of(lab, block)
    own, theirs = WindowAttention(6, 5), policy.scorer
    for layer in found.layers:
        old = ~found.recent
        ours = own.of_heads(found, layer)[:, old].numpy()
        assert np.allclose(ours, theirs.of_heads(found, layer)[:, old].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "AdaKVPress",
        "ExpectedAttentionPress",
        "LeverageScorePress",
        "ObservedAttentionPress",
        "PyramidKVPress",
        "QFilterPress",
    ],
)
def test_presses_of_kvpress_that_need_more_are_refused(name: str) -> None:
    pytest.importorskip("kvpress", reason="kvpress is not installed")
    with pytest.raises(ArborError, match=name):
        policy_of(f"kvpress:{name}")


def test_protection_is_that_of_other_policies() -> None:
    real("KnormPress")
    assert policy_of("kvpress:KnormPress").protect == Protect()
