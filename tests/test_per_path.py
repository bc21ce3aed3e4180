"""``among=path``: each running path ranks its own tokens, and idle blocks lose theirs first."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.models import build
from support.offers import offer
from support.policies import POLICIES
from support.trees import GREEDY, Lab

from arbor.components import build as built
from arbor.errors import UsageError
from arbor.retention.base import Floats, Tokens
from arbor.retention.per_path import PerPath
from arbor.retention.policy import Policy, Protect
from arbor.retention.scorers import Recency
from arbor.run.settings import check_lossy

pytestmark = pytest.mark.usefixtures("loaded_once")
LITTLE = Protect(sinks=0, recent=1)


def changed(name: str, **settings: Any) -> Policy:
    return dataclasses.replace(POLICIES[name], protect=LITTLE, **settings)


def grown(policy: Policy) -> list[int]:
    """Tokens left of the prompt, of the first block of a long path, and of the ends of this path
    and a short one, which run together."""
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    first, idle = lab.sprout([(tree.root, 2)], GREEDY, 10)
    (second,) = lab.sprout([(first, 1)], GREEDY, 10)
    long, short = lab.sprout([(second, 1), (tree.root, 1)], GREEDY, 10)
    assert not idle.span.resident.any()
    return [int(node.span.resident.sum()) for node in (tree.root, first, long, short)]


def test_a_short_running_path_keeps_as_many_tokens_as_a_long_one() -> None:
    """The two paths have 12 tokens in common, 30 and 10 of their own, and room for 40."""
    assert grown(changed("streaming", among="path")) == [7, 0, 10, 10]
    # as one sequence, the newest tokens of the short path lie before those of the long one
    assert grown(changed("streaming", spares_paths=True)) == [0, 7, 10, 7]


def test_a_token_has_its_best_place_on_any_path() -> None:
    tokens = dataclasses.replace(
        offer(3, 3, ties=False).tokens,
        **{
            name: np.arange(5)
            for name in ("offset", "position", "queries", "activated", "recurrence")
        },
        block=np.array([0, 0, 1, 1, 2]),
        **{name: np.zeros(5) for name in ("mass", "latest", "lately", "credit")},
        key=np.arange(5, dtype=np.uint64),
        protected=np.zeros(5, np.bool_),
    )

    class Given:
        observes = False

        def scores(self, tokens: Tokens) -> Floats:
            return np.array([5.0, 1.0, 4.0, 4.0, 0.0])

    both = np.array([[True, True, False], [True, False, True]])

    # on the first path 5, 4 (the later one), 4, 1; on the second 5, 1, 0
    assert PerPath(Given(), both).scores(tokens).tolist() == [0, -1, -2, -1, -2]
    one = PerPath(Recency(), np.array([[True, True, True]])).scores(tokens)
    assert one.argsort().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["lru", "ends", "thinkv", "ams", "adakv"])
def test_a_policy_that_does_not_rank_all_tokens_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="among=path") as caught:
        built("policy", name, among="path")

    assert "spares_paths=true" in str(caught.value.hint)


def test_lossless_mode_refuses_it() -> None:
    policy = built("policy", "h2o,among=path")
    check_lossy(policy, "lossy")
    with pytest.raises(UsageError, match="lossless mode") as caught:
        check_lossy(policy, "lossless")

    assert "mode=lossy" in str(caught.value.hint)
