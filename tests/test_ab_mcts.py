"""AB-MCTS against posteriors computed by hand and a small reading of the paper."""

from __future__ import annotations

import random
from functools import cache

import pytest
from support.fakes import Key, Script, hashed, run

from arbor.controllers.ab_mcts import ABMCTS, Posterior


def test_the_gaussian_posterior_by_hand() -> None:
    """After 0.2 and 0.6: mean 0.4, squares about it 0.08; kappa = nu = 3.

    m = 2 x 0.4 / 3, tau^2 = (1 x 0.1 + 0.08 + 2 x 1 x 0.4^2 / 3) / 3.
    """
    posterior = Posterior()
    assert posterior.parameters() == pytest.approx((0.0, 1.0, 1.0, 0.1))

    posterior.observe(0.2)
    posterior.observe(0.6)

    tau_square = (0.1 + 0.08 + 2 * 0.16 / 3) / 3
    assert posterior.parameters() == pytest.approx((0.8 / 3, 3.0, 3.0, tau_square))


def read_from_the_paper(script: Script, thoughts: int, max_depth: int, seed: int) -> list[Key]:
    """The parents of the thoughts in order; observations are kept as lists, by keys."""
    rng = random.Random(seed)
    wider: dict[Key, list[float]] = {}
    deeper: dict[Key, list[float]] = {}
    own: dict[Key, list[float]] = {}
    made: dict[Key, int] = {}
    grown: list[Key] = []

    def draw(observed: list[float]) -> float:
        posterior = Posterior()
        for value in observed:
            posterior.observe(value)
        return posterior.draw(rng)

    def usable(key: Key) -> bool:
        thought = script(key)
        return not thought.terminal and thought.value > 0 and len(key) < max_depth

    for _ in range(thoughts):
        key: Key = ()
        while True:
            children = [(*key, place) for place in range(made.get(key, 0)) if usable((*key, place))]
            if not children or draw(wider.get(key, [])) >= draw(deeper.get(key, [])):
                break
            drawn = {child: draw(own[child]) for child in children}
            key = max(drawn, key=lambda child: drawn[child])
        grown.append(key)
        child = (*key, made.get(key, 0))
        made[key] = made.get(key, 0) + 1
        value = script(child).value
        wider.setdefault(key, []).append(value)
        for depth in range(1, len(child) + 1):
            own.setdefault(child[:depth], []).append(value)
        for depth in range(len(child) - 1):
            deeper.setdefault(child[:depth], []).append(value)
    return grown


def test_it_agrees_with_a_reading_of_the_paper_on_random_trees() -> None:
    for seed in range(300):
        script = cache(hashed(seed, words=10**9, terminal=0.2, values=1 + seed % 7))
        thoughts, depth = 1 + seed % 30, 1 + seed % 5
        settings = ABMCTS(thoughts=thoughts, leaves=1, stop_value=None, seed=seed)

        done = run(settings, script, depth)

        asked = [key for [(key, _)] in done.asked]
        assert asked == read_from_the_paper(script, thoughts, depth, seed)
