"""What one run gives the engine ends with the run; the tree stays."""

from __future__ import annotations

from typing import Any

from support.models import build
from support.trees import GREEDY, Lab, own_logits, relative_error

from arbor import Solver
from arbor.events import Event, Forwarded, Sampled
from arbor.tree import NodeState, ThoughtTree


def test_a_finished_run_emits_nothing_and_its_tree_still_grows() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(slots=24)
    (first,) = lab.sprout([(tree.root, 1)], GREEDY)
    heard = len(lab.events)
    lab.finish()

    (second,) = lab.sprout([(first, 1)], GREEDY)
    (other,) = lab.sprout([(tree.root, 1)], GREEDY)
    lab.extend(second)
    lab.forget([other])

    assert len(lab.events) == heard
    want = own_logits(build("llama"), tree)[second.id][-1]
    lab.extend(second)
    assert relative_error(lab.state.logits[second.id], want) < 1e-5
    lab.plant(slots=24)
    assert len(lab.events) > heard, "the next run is heard again"


def test_decoding_is_reported_as_finely_as_the_run_asks() -> None:
    lab = Lab(build("llama"))
    heard: dict[str, list[Event]] = {}
    for detail in ("events", "steps", "tokens"):
        tree = ThoughtTree((5, 17, 40))
        found: list[Event] = []
        heard[detail] = found
        lab.open(tree, 64, emit=found.append, detail=detail)
        lab.extend(tree.root)
        lab.sprout([(tree.root, 2)])

    steps = {
        detail: sum(isinstance(e, Forwarded) and e.kind == "decode" for e in events)
        for detail, events in heard.items()
    }
    assert steps == {"events": 1, "steps": 5, "tokens": 5}
    assert any(isinstance(event, Sampled) for event in heard["tokens"])
    assert not any(isinstance(event, Sampled) for event in heard["steps"])


class Listener:
    """A listener that takes much memory, for all the engine knows."""

    def __call__(self, event: Event) -> None:
        pass


def test_a_solver_finishes_a_run_that_fails() -> None:
    class Broken(Listener):
        def __call__(self, event: Any) -> None:
            if event.name == "boundary":
                raise ZeroDivisionError

    heard: list[Event] = []
    with Solver(controller="chain", listeners=[heard.append, Broken()]) as solver:
        try:
            solver.solve("4 5 6 10")
        except ZeroDivisionError:
            count = len(heard)
        solver.engine.extend(solver.engine.tree.root)
    assert len(heard) == count > 0


def test_room_counts_the_longest_path_that_is_still_alive() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(slots=40)
    (first,) = lab.sprout([(tree.root, 1)])
    (second,) = lab.sprout([(first, 1)])
    assert lab.room(3) == (40 - second.end) // 3
    second.state = NodeState.PRUNED
    lab.forget([second])
    assert lab.room(3) == (40 - first.end) // 3
    first.state = NodeState.PRUNED
    lab.forget([first])
    assert lab.room(3) == (40 - tree.root.end) // 3
    (other,) = lab.sprout([(tree.root, 1)], length=2)
    assert lab.room(3) == (40 - other.end) // 3


def test_room_does_not_look_at_every_block_again() -> None:
    lab = Lab(build("llama"))
    tree = lab.plant(slots=400)
    for _ in range(6):
        lab.sprout([(tree.root, 4)], length=2)
    lab.room(3)
    looked_at = []

    class Counted(ThoughtTree):
        def __iter__(self) -> Any:
            looked_at.append(True)
            return super().__iter__()

    tree.__class__ = Counted
    lab.room(3)
    assert not looked_at
