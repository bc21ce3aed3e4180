"""Best-first search against a tree computed by hand."""

from __future__ import annotations

from functools import cache

from support.fakes import Key, hashed, run

from arbor.controllers.best_first import BestFirst


def test_it_agrees_with_a_priority_queue_on_random_trees() -> None:
    for seed in range(300):
        width, expansions = 1 + seed % 4, 1 + seed % 15
        script = cache(hashed(seed, words=10**9, terminal=0.2, values=1 + seed % 6))
        queue: list[Key] = [()]
        order: list[Key] = []  # of creation
        grown: list[Key] = []
        while queue and len(grown) < expansions:
            queue.sort(key=lambda key: (-script(key).value if key else 0, -len(key)))
            best = queue[0]
            level = [key for key in queue if key == best or _equal(script, key, best)]
            best = min(level, key=lambda key: order.index(key) if key else -1)
            queue.remove(best)
            grown.append(best)
            for place in range(width):
                child = (*best, place)
                order.append(child)
                thought = script(child)
                if not thought.terminal and thought.value > 0 and len(child) < 4:
                    queue.append(child)

        done = run(
            BestFirst(width=width, expansions=expansions, leaves=1, stop_value=None), script, 4
        )

        assert [key for [(key, _)] in done.asked] == grown


def _equal(script: object, one: Key, other: Key) -> bool:
    assert callable(script)
    return len(one) == len(other) and bool(script(one).value == script(other).value)
