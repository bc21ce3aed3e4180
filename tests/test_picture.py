"""The static picture of a run: every block, bounded size, no words of a model as markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable

from support.fake_run import fake_run

from arbor.events import KV, Answered, Ended, Event, Forwarded, Opened
from arbor.trace.fold import Replay
from arbor.view.picture import MOST_BLOCKS, MOST_POINTS, search_picture

SVG = "{http://www.w3.org/2000/svg}"


def folded(events: Iterable[Event]) -> Replay:
    replay = Replay()
    for event in events:
        replay(event)
    return replay


def opened(node: int, parent: int | None, depth: int) -> Opened:
    return Opened(node, parent, 0, depth, 0, "")


def circles(picture: str) -> list[ET.Element]:
    """The blocks of a picture; fails where it is not well-formed XML."""
    return ET.fromstring(picture).findall(f"{SVG}circle")


def test_every_block_is_drawn_once_and_the_answers_path_is_marked() -> None:
    replay = folded(fake_run(seed=1))
    assert replay.answered is not None

    drawn = circles(search_picture(replay))

    titles = [each.findtext(f"{SVG}title", "") for each in drawn]
    assert sorted(int(re.match(r"#(\d+)", t)[1]) for t in titles) == sorted(replay.blocks)  # type: ignore[index]
    marked = [t for each, t in zip(drawn, titles, strict=True) if each.get("r") == "4"]
    assert [int(t[1:].partition(",")[0]) for t in marked] == list(replay.answered.path)
    places = {(each.get("cx"), each.get("cy")) for each in drawn}
    assert len(places) == len(drawn)


def test_nothing_in_it_loads_or_runs() -> None:
    picture = search_picture(folded(fake_run(seed=1)))

    assert not re.search(r"<script|<style|<image|<use|href|url\(| on[a-z]+=", picture)
    allowed = {"svg", "title", "path", "circle", "text", "polygon", "polyline"}
    assert {each.tag.removeprefix(SVG) for each in ET.fromstring(picture).iter()} <= allowed


def test_a_large_run_gives_a_small_picture() -> None:
    """A chain of 50 blocks, and thousands of blocks below the root; the answer's path is deep."""
    count = 20_000
    chain = [opened(node, node - 1 if node else None, node) for node in range(50)]
    wide = [opened(node, 0, 1) for node in range(50, count)]
    work = [Forwarded("decode", 1, 1, 1, 1, KV(n % 90), n % 90, 0.0) for n in range(5_000)]
    answer = Answered(49, tuple(range(50)), "24", 1.0, True)
    replay = folded([*chain, *wide, *work, answer, Ended("solved", count)])

    picture = search_picture(replay)

    assert len(circles(picture)) == MOST_BLOCKS
    assert sum(each.get("r") == "4" for each in circles(picture)) == 50
    assert f"{count - MOST_BLOCKS:,} blocks are not drawn" in picture
    line = re.search(r'<polyline points="([^"]*)"', picture)
    assert line is not None and 1 < len(line[1].split()) <= MOST_POINTS
    assert len(picture) < 250_000
    root = ET.fromstring(picture)
    height = float(root.attrib["viewBox"].split()[3])
    assert height < 400
