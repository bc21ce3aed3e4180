"""How long a path may grow before K/V written earlier no longer fits K/V written later."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import config_of, copy_of, random_model
from support.trees import GREEDY, Lab, own_logits, relative_error

from arbor.model.attention import context_limit

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
