"""The scorer `combined`: attention times the size of the value, less likeness to neighbours."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.models import build
from support.policies import POLICIES
from support.trees import GREEDY, Lab

from arbor.components import build as component
from arbor.events import Evicted
from arbor.papers.hierarchy.combined import Combined
from arbor.retention.base import Tokens
from arbor.retention.policy import Protect, Trigger
from arbor.testing import random_kv


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_combined_is_the_difference_of_its_terms(seed: int, values: bool) -> None:
    kv = random_kv(seed, 20)
    (sequence,) = kv.sequences
    mass = np.random.default_rng(seed).random(len(kv))
    tokens = Tokens.when_read({}, mass=mass, kv=kv)
    norms, likeness = np.zeros(len(sequence)), np.zeros(len(sequence))
    for layer in sequence.layers:
        keys = sequence.keys(layer).double().numpy()  # [n, H, D]
        unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        for at in range(len(sequence)):
            near = [other for other in (at - 1, at + 1) if 0 <= other < len(sequence)]
            each = [float((unit[at] * unit[other]).sum(-1).mean()) for other in near]
            likeness[at] += np.mean(each) / len(sequence.layers)
        size = np.abs(sequence.values(layer).double().numpy()).sum(-1).mean(-1)
        norms += size / len(sequence.layers)
    places = kv.places
    wanted = mass * (norms[places] if values else 1.0) - likeness[places]
    wanted[places < 0] = -2.0

    assert Combined(values).scores(tokens) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["combined", "vatp"])
def test_the_hierarchy_destroys_by_it(name: str) -> None:
    policy = dataclasses.replace(
        POLICIES["hierarchy"],
        scorer=component("scorer", name),
        protect=Protect(sinks=2, recent=4, prompt=True),
        trigger=Trigger(every=8),
    )
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(200)
    lab.sprout([(tree.root, 1)], GREEDY, 80)

    assert any(isinstance(event, Evicted) for event in lab.events)
