"""Long paths, computed in several forwards: the K/V, the account and the results of one forward."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import Words, build, path_logits
from support.trees import PROMPT, SAMPLED, Lab, grown, own_answers, relative_error

from arbor.engine import mode, scheduler
from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.events import Forwarded, Rehydrated
from arbor.model.runner import ModelRunner
from arbor.tasks.base import BlockLimits
from arbor.tree import ThoughtTree

LONG = tuple((7 * i + 3) % 95 for i in range(30))
MOST = 8
GROWTH = Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 5, 8), ()))


@pytest.fixture(autouse=True)
def short_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 8 new tokens join a forward."""
    monkeypatch.setattr(scheduler, "MOST_NEW", MOST)
    monkeypatch.setattr(mode, "MOST_NEW", MOST)


def opened(lab: Lab, *prompts: tuple[int, ...], pool: int = 200) -> list[ThoughtTree]:
    trees = [ThoughtTree(prompt) for prompt in prompts]
    for tree in trees:
        lab.open(tree, pool, alone=False, pool=pool)
    return trees


def steps(lab: Lab) -> list[int]:
    """Rows of each forward until nothing is left to do."""
    rows = []
    while lab.busy:
        before = lab.rows()
        lab.step()
        rows.append(lab.rows() - before)
    return rows


def kinds(lab: Lab) -> list[tuple[str, int]]:
    return [(e.kind, e.rows) for e in lab.events if isinstance(e, Forwarded)]


def alone(prompt: tuple[int, ...]) -> list[int]:
    """The block that grows from a prompt computed at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scheduler, "MOST_NEW", 1000)
        lab = Lab(build("llama"), debug=True)
        (tree,) = opened(lab, prompt)
        operation = lab.begin_grow([(tree.root, 1)], GROWTH)
        steps(lab)
    return operation.result()[0].tokens


def test_a_long_prompt_is_computed_in_parts() -> None:
    lab = Lab(build("llama"), debug=True)
    (tree,) = opened(lab, LONG)
    visit = lab.begin_extend(tree.root)

    assert steps(lab) == [8, 8, 8, 6]

    visit.result()
    assert tree.root.span.exact.all()
    assert kinds(lab) == [("prefill", 8), ("prefill", 8), ("prefill", 8), ("prefill", 6)]
    assert not any(isinstance(event, Rehydrated) for event in lab.events)
    (got,) = lab.ask([tree.root], [(7, 8, 9)])
    want = path_logits(build("llama"), [*LONG, 7, 8, 9])[-1]
    assert relative_error(got, want) < 1e-5


def test_blocks_decode_while_the_prompt_of_a_later_search_is_computed() -> None:
    lab = Lab(build("llama"), debug=True)
    short, long = opened(lab, PROMPT[:4], LONG)
    growing = lab.begin_grow([(short.root, 2)], GROWTH)
    lab.step()
    later = lab.begin_grow([(long.root, 1)], GROWTH)
    progress = []
    for _ in range(3):
        lab.step()
        held = int(long.root.span.exact.sum())
        progress.append((held, *(len(child.tokens) for child in growing.children)))
    steps(lab)

    assert progress == [(8, 2, 2), (16, 3, 3), (24, 4, 4)]
    assert growing.result()[0].tokens == alone(PROMPT[:4])
    assert later.result()[0].tokens == alone(LONG)


@pytest.mark.parametrize("policy", ["lru", "reentry", "arborkv"])
def test_paths_come_back_in_parts(policy: str) -> None:
    lab = Lab(build("llama"), policy=policy, debug=True)
    tree, answers = grown(lab, slots=34)
    rehydrated = [rows for kind, rows in kinds(lab) if kind == "rehydrate"]

    assert rehydrated and max(rehydrated) <= MOST + 1  # and a last token for its logits
    assert relative_error(answers, own_answers(build("llama"), tree)) < 1e-4


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_failure_between_the_parts_takes_back_its_own(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(build("llama"), debug=True)
    (tree,) = opened(lab, LONG)
    visit = lab.begin_extend(tree.root)
    for _ in range(after):
        lab.step()
    right = ModelRunner.forward

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(ModelRunner, "forward", fail)
    lab.step()
    monkeypatch.setattr(ModelRunner, "forward", right)

    with pytest.raises(RuntimeError, match="broken"):
        visit.result()
    assert lab.memory.used == MOST * after
    again = lab.begin_extend(tree.root)
    steps(lab)
    again.result()
    assert tree.root.span.exact.all()


@pytest.mark.parametrize(("pool", "rows"), [(200, [8, 8, 8, 6]), (24, [6] * 5)])
def test_lossy_mode_computes_a_long_prompt_in_pieces(pool: int, rows: list[int]) -> None:
    lab = Lab(build("llama"), mode="lossy", rehydrate="off", policy="uniform", debug=True)
    (tree,) = opened(lab, LONG, pool=pool)
    visit = lab.begin_extend(tree.root)
    steps(lab)

    visit.result()
    assert [count for kind, count in kinds(lab) if kind == "prefill"] == rows
    assert lab.memory.peak <= pool
