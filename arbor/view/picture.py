"""A run as one static SVG: the tree with the answer's path, and the KV against the budget.

No script, no style sheet, no colours of the page: lines and words take the colour of the text
around them, so that the picture is readable on light and on dark grounds.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from arbor.events import KV
from arbor.trace.fold import Block, Replay
from arbor.tree import NodeState

WIDTH = 760  # of the drawing; CSS pixels at most
MARGIN = 12
TREE_HEIGHTS = (60, 260)  # least and most
ROW = 14  # most pixels for one leaf
CURVE_HEIGHT = 64
MOST_BLOCKS = 400  # drawn; the answer's path first, then level by level
MOST_POINTS = 300  # of the curve
MOST_TITLE = 160  # characters of a thought

INK, BLUE, ORANGE, RED = "currentColor", "#4a86c8", "#d9822b", "#cc4444"


def search_picture(replay: Replay) -> str:
    """The tree and the memory of a run as an ``<svg>`` element.

    At most `MOST_BLOCKS` blocks and `MOST_POINTS` points are drawn, however long the run. A block's
    text is in its title, escaped.
    """
    path = () if replay.answered is None else replay.answered.path
    shown = _shown(replay, path)
    tree, height = _tree(replay, shown, set(path))
    curve = _curve(replay, height + 22)
    total = height + 22 + CURVE_HEIGHT + 18
    left_out = len(replay.blocks) - len(shown)
    caption = f"{len(replay.blocks) - 1:,} thoughts"
    if left_out:
        caption += f"; {left_out:,} blocks are not drawn"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {total}" '
        f'width="{WIDTH}" style="max-width:100%;height:auto;font:11px system-ui,sans-serif">'
        f"<title>The tree of the search, and its KV over the run</title>"
        f'{tree}<text x="{MARGIN}" y="{height + 12}" fill="{INK}">{html.escape(caption)}</text>'
        f"{curve}</svg>"
    )


def plain_text(text: str, most: int = MOST_TITLE) -> str:
    """A model's text on one line, cut and escaped; signs that cannot be printed become spaces."""
    begun = text[: 4 * most]  # white space collapses
    joined = " ".join("".join(s if s.isprintable() else " " for s in begun).split())
    return html.escape(joined if len(joined) <= most else f"{joined[: most - 1]}…")


def _shown(replay: Replay, path: Iterable[int]) -> list[int]:
    """The blocks to draw: the answer's path, then level by level from the root."""
    chosen = {node: None for node in path if node in replay.blocks}
    queue = [0] if 0 in replay.blocks else []
    for node in queue:  # grows as it is read
        if len(chosen) >= MOST_BLOCKS:
            break
        chosen[node] = None
        queue.extend(replay.blocks[node].children)
    return sorted(chosen)


def _rows(replay: Replay, drawn: set[int]) -> tuple[dict[int, float], int]:
    """The row of each block, leaves in the order of the branches, and the number of leaves."""
    rows: dict[int, float] = {}
    leaves = 0
    stack = [(0, False)] if 0 in drawn else []
    while stack:
        node, below_done = stack.pop()
        children = [child for child in replay.blocks[node].children if child in drawn]
        if children and not below_done:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children))
        elif children:
            rows[node] = (rows[children[0]] + rows[children[-1]]) / 2
        else:
            rows[node] = leaves
            leaves += 1
    return rows, leaves


def _tree(replay: Replay, shown: list[int], path: set[int]) -> tuple[str, int]:
    """The drawing of the tree, and its height."""
    rows, leaves = _rows(replay, set(shown))
    shown = [node for node in shown if node in rows]
    least, most = TREE_HEIGHTS
    height = round(min(most, max(least, ROW * leaves)))
    deepest = max((replay.blocks[node].depth for node in shown), default=0)
    across = (WIDTH - 2 * MARGIN) / max(1, deepest)
    down = (height - 2 * MARGIN) / max(1, leaves - 1)

    def place(block: Block) -> tuple[float, float]:
        return MARGIN + across * block.depth, MARGIN + down * rows[block.id]

    lines, dots = [], []
    for node in sorted(shown, key=lambda node: node in path):  # the answer's path on top
        block = replay.blocks[node]
        x, y = place(block)
        on_path = node in path
        if block.parent in rows:
            left, above = place(replay.blocks[block.parent])
            middle = (left + x) / 2
            style = (
                f'stroke="{ORANGE}" stroke-width="2"'
                if on_path
                else f'stroke="{INK}" stroke-opacity="0.3"'
            )
            lines.append(
                f'<path d="M{left:.1f} {above:.1f}C{middle:.1f} {above:.1f} {middle:.1f} {y:.1f} '
                f'{x:.1f} {y:.1f}" fill="none" {style}/>'
            )
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if on_path else 3}" {_paint(block, on_path)}>'
            f"<title>{_title(block)}</title></circle>"
        )
    return "".join([*lines, *dots]), height


def _paint(block: Block, on_path: bool) -> str:
    """A pruned block is hollow; others are the fuller, the higher their value."""
    colour = ORANGE if on_path else BLUE
    if block.state is NodeState.PRUNED:
        return f'fill="none" stroke="{INK}" stroke-opacity="0.45"'
    opacity = 1 if on_path or not block.verified else 0.25 + 0.75 * min(1, max(0, block.value))
    return f'fill="{colour}" fill-opacity="{opacity:.2f}" stroke="{colour}"'


def _title(block: Block) -> str:
    parts = [f"#{block.id}", str(block.state.value), f"{block.tokens:,} tokens"]
    if block.verified:
        parts.append(f"value {block.value:.2f}")
    if block.answer is not None:
        parts.append(f"answer {plain_text(block.answer, 40)}")
    return f"{', '.join(parts)}: {plain_text(block.text)}"


def _curve(replay: Replay, top: int) -> str:
    """The KV on the device over the events, and the budget as a line."""
    budget = replay.metrics().budget_tokens
    full = max(1, replay.peak)
    # a budget far above what was held would leave the curve flat
    scale = max(full, budget) if budget <= 2 * full else full * 1.1
    points = _thinned(replay.series)
    last = max(1, replay.events - 1)

    def at(number: float, tokens: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * number / last
        return f"{x:.1f},{top + CURVE_HEIGHT * (1 - tokens / scale):.1f}"

    base = top + CURVE_HEIGHT
    parts = []
    if points:
        line = " ".join(at(number, tokens) for number, tokens in points)
        ends = at(points[0][0], 0), at(points[-1][0], 0)
        parts.append(
            f'<polygon points="{ends[0]} {line} {ends[1]}" fill="{BLUE}" fill-opacity="0.3"/>'
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{BLUE}"/>')
    parts.append(
        f'<path d="M{MARGIN} {base}H{WIDTH - MARGIN}" stroke="{INK}" stroke-opacity="0.4"/>'
    )
    words = f"KV on the device, at most {full:,} tokens"
    if budget and budget <= scale:
        y = top + CURVE_HEIGHT * (1 - budget / scale)
        parts.append(
            f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="{RED}" stroke-dasharray="5 3"/>'
        )
        words += f"; the dashed line is the budget of {budget:,}"
    elif budget:
        words += f"; the budget of {budget:,} lies above the picture"
    parts.append(f'<text x="{MARGIN}" y="{base + 13}" fill="{INK}">{words}</text>')
    return "".join(parts)


def _thinned(series: list[tuple[int, KV]]) -> list[tuple[int, int]]:
    """At most `MOST_POINTS` of (event, tokens on the device): the highest of each stretch."""
    step = -(-len(series) // MOST_POINTS) or 1
    stretches = (series[begin : begin + step] for begin in range(0, len(series), step))
    return [
        (number, kv.device)
        for number, kv in (max(part, key=lambda each: each[1].device) for part in stretches)
    ]
