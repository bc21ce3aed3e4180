"""Presses of kvpress as scorers and policies: against stand-ins, and, where it is installed,
kvpress itself."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import presses
import pytest
import torch
from support.models import build
from support.slow_cases import every
from support.trees import GREEDY, Lab

from arbor import components
from arbor.errors import UsageError
from arbor.retention.policy import Policy
from arbor.retention.token_kv import KVSequence
from arbor.testing import check_policy
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
@pytest.mark.parametrize("name", every(2, ["NormPress", "SnapKVPress"]))
def test_press_policies_keep_the_rules(name: str) -> None:
    check_policy(policy_of(f"kvpress:{name}"))
    check_policy(policy_of(f"kvpress:{name},granularity=head"))


@pytest.mark.usefixtures("stand_ins")
def test_a_press_that_scores_by_its_ratio_keeps_what_it_never_removes() -> None:
    policy = policy_of("kvpress:SinkPress,n_sink=7")
    lab, block = grown(policy)
    found = sequence_of(lab, block)

    for layer in found.layers:
        scores = policy.scorer.of_heads(found, layer)  # type: ignore[attr-defined]
        assert (scores[:, :7] == 1).all() and (scores[:, 7:] == 0).all()


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
        "StreamingLLMPress",
        "TOVAPress",
    ],
)
def test_scores_are_those_of_kvpress_after_a_prompt(name: str) -> None:
    """The press, asked by arbor, and asked with the model's own layer and hidden states."""
    settings = {"SnapKVPress": {"window_size": 6}, "LagKVPress": {"lag_size": 8}}.get(name, {})
    press = real(name, **settings, compression_ratio=0.9999)
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
