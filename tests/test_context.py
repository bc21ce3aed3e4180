"""How long a path may grow before K/V written earlier no longer fits K/V written later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.models import config_of, copy_of, random_model
from support.trees import GREEDY, Lab, own_logits, relative_error

from arbor.model.context_limit import DEFAULT_CONTEXT, context_limit

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
RESCALING = {
    "longrope": ("phi3", {"original_max_position_embeddings": 24, "rope_parameters": LONGROPE}),
    "dynamic": ("llama", {"max_position_embeddings": 24, "rope_parameters": DYNAMIC}),
}


def grown_error(config: Any, length: int) -> float:
    """Error of the logits at the end of a path of `length` tokens: a prompt and two blocks."""
    # fresh: a rotary embedding remembers the longest batch it saw
    own = copy_of(random_model(config))
    lab = Lab(copy_of(own))
    tree = lab.plant()
    rest = length - tree.root.end
    (first,) = lab.sprout([(tree.root, 1)], GREEDY, rest // 2)
    (end,) = lab.sprout([(first, 1)], GREEDY, rest - rest // 2)
    assert end.end == length
    answers = lab.ask([end.parent or end], [end.tokens])
    return relative_error(answers[0], own_logits(own, tree)[end.id][-1])


@pytest.mark.parametrize("name", RESCALING)
def test_paths_up_to_the_limit_are_exact_and_longer_ones_are_not(name: str) -> None:
    model_type, settings = RESCALING[name]
    config = config_of(model_type, **settings)

    limit = context_limit(config)

    assert limit == 24
    assert grown_error(config, limit) < 1e-5
    assert grown_error(config, limit + 6) > 1e-3


@pytest.mark.parametrize(
    ("model_type", "settings", "limit"),
    [
        ("llama", {}, 512),
        ("gpt2", {"max_position_embeddings": 128}, 128),
        ("gemma3_text", {}, 512),
        ("phi3", {"original_max_position_embeddings": 64}, 512),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                }
            },
            512,
        ),
    ],
    ids=["plain", "learned positions", "by layer type", "plain with an original length", "yarn"],
)
def test_rotations_that_never_change_reach_the_models_own_length(
    model_type: str, settings: dict[str, Any], limit: int
) -> None:
    assert context_limit(config_of(model_type, **settings)) == limit


def test_the_shortest_limit_of_all_layer_types_counts() -> None:
    config = SimpleNamespace(
        max_position_embeddings=512,
        rope_parameters={
            "full_attention": {**LONGROPE, "original_max_position_embeddings": 96},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )

    assert context_limit(config) == 96


def test_a_config_that_names_no_length_gets_a_usual_one() -> None:
    assert context_limit(object()) == DEFAULT_CONTEXT
