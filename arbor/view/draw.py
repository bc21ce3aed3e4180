"""A run's state as terminal text: a meter of the KV, and the tree with each block's KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from arbor.events import Compared, Event, Evicted, Merged, Rehydrated, Shared
from arbor.metrics import Metrics
from arbor.support.texts import counted, duration_text, human_bytes
from arbor.trace.fold import Block, Replay
from arbor.tree import NodeState

CELLS = 8  # of a block's bar
METER_CELLS = 30
SETTLED_S = 5.0  # of a run; before, the time left is not estimated
NARROW = 60  # columns; below this there is only the meter
MOST_ROWS = 24
MOST_SIBLINGS = 3  # off the running paths, per parent
MOST_NAMED = 5  # blocks of one movement
MOST_CHARACTERS = 1000  # of a text; no terminal is wider


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters for one kind of terminal."""

    full: str
    parts: str  # growing parts of a cell, without none and all of it
    gone: str
    branch: str
    last: str
    bar: str
    verified: str
    pruned: str
    answer: str
    more: str
    times: str


UNICODE = Glyphs("█", "▏▎▍▌▋▊▉", "·", "├── ", "└── ", "│   ", "✓", "✗", "◆", "…", "×")
ASCII = Glyphs("#", "", ".", "|-- ", "`-- ", "|   ", "+", "x", "*", "...", "x")


def draw(
    replay: Replay, width: int, height: int, glyphs: Glyphs = UNICODE, most_blocks: int = 0
) -> Group:
    """The current state of a replay.

    Args:
        replay: of a trace, or of a run in progress.
        width, height: of the terminal; below `NARROW` columns the tree is left out.
        glyphs: `ASCII` for terminals without Unicode.
        most_blocks: thoughts that the plan has at most; 0 for unknown.
    """
    metrics = replay.metrics()
    meter = list(meter_lines(replay, metrics, glyphs, width, most_blocks))
    if width < NARROW:
        return Group(*meter)
    shown: list[Text | Panel] = list(meter)
    if glyphs is UNICODE:
        task = "" if replay.header is None else plain(replay.header.task, glyphs)
        title = Text(f"arbor {task}".rstrip())
        shown = [Panel(Group(*meter), title=title, title_align="left", width=width)]
    rows = min(MOST_ROWS, height - len(meter) - 4)
    return Group(*shown, *tree_lines(replay, glyphs, width, rows))


def meter_lines(
    replay: Replay, metrics: Metrics, glyphs: Glyphs, width: int, most_blocks: int = 0
) -> Iterator[Text]:
    """KV against the budget, KV of each lower tier, the counters, and the time left."""
    held, budget = replay.kv, metrics.budget_tokens
    part = held.device / budget if budget else 0.0
    cells = min(METER_CELLS, max(CELLS, width - 50))
    size = human_bytes(held.device * metrics.bytes_per_token)
    yield Text.assemble(
        "KV   ",
        (bar(part, cells, glyphs), "red" if part > 1 else "blue"),
        f" {held.device:,} of {budget:,} tokens, {size}, {100 * part:.0f} % of budget",
    )
    plan = {} if replay.header is None else replay.header.kv
    packed = int(plan.get("host_token_bytes", metrics.bytes_per_token))
    for name, tokens in (("host", held.host), ("packed", held.compressed), ("disk", held.disk)):
        if tokens:
            size = human_bytes(tokens * (packed if name == "packed" else metrics.bytes_per_token))
            yield Text(f"{name:<7}{tokens:,} tokens, {size}")
    yield Text(
        f"{counted(metrics.blocks, 'block')}  {counted(metrics.expansions, 'expansion')}  "
        f"{metrics.tok_per_s:.0f} tok/s  {counted(metrics.transitions, 'transition')}  "
        f"{metrics.pressure_events:,} pressure"
    )
    yield Text(
        f"{counted(metrics.evictions, 'eviction')}  "
        f"{counted(metrics.rehydrations, 'rehydration')}  "
        f"{metrics.tokens_recomputed:,} recomputed  {metrics.asked:,} judged  {metrics.wall_s:.1f} s"
    )
    left = "" if replay.ended else time_left(metrics, most_blocks)
    if left:
        yield Text(left)


def time_left(metrics: Metrics, most_blocks: int) -> str:
    """About how long a run may still take, if it grows all blocks of its plan; empty at first."""
    if not 0 < metrics.blocks < most_blocks or metrics.wall_s < SETTLED_S:
        return ""
    seconds = metrics.wall_s / metrics.blocks * (most_blocks - metrics.blocks)
    return f"up to about {duration_text(seconds)} left"


def movement(event: Event) -> str:
    """What an event moves in the KV, in words; empty where it moves nothing."""
    if isinstance(event, Evicted):
        stored = sum(tokens for _, tokens in event.stored)
        below = f", {stored:,} to a lower tier" if stored else ""
        return f"leave   {_tokens_of(event.nodes)} ({event.cause}){below}"
    if isinstance(event, Rehydrated):
        how = "fetched" if event.mode == "fetch" else "computed again"
        return f"return  {_tokens_of(event.nodes)}, {how}"
    if isinstance(event, Shared):
        how = "loaded from a file" if event.source == "file" else "shared"
        return f"return  {_tokens_of(event.nodes)}, {how}"
    if isinstance(event, Merged):
        return f"share   {_tokens_of([(node, tokens) for node, _, tokens in event.nodes])}"
    if isinstance(event, Compared) and event.shared:
        return f"similar {event.similarity:.2f}: an earlier prompt is read instead (lossy)"
    return ""


def _tokens_of(nodes: Sequence[tuple[int, int]]) -> str:
    blocks = " ".join(f"#{node}" for node, _ in nodes[:MOST_NAMED])
    more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
    return f"{sum(tokens for _, tokens in nodes):,} tokens of {blocks}{more}"


def bar(part: float, cells: int, glyphs: Glyphs) -> str:
    """A bar filled to `part` of its cells."""
    part = min(1.0, max(0.0, part))
    steps = len(glyphs.parts) + 1
    filled, rest = divmod(round(part * cells * steps), steps)
    partial = glyphs.parts[rest - 1] if rest else ""
    return (glyphs.full * filled + partial).ljust(cells, glyphs.gone)


def tree_lines(replay: Replay, glyphs: Glyphs, width: int, rows: int) -> Iterator[Text]:
    """At most `rows` lines of the tree: the running paths and their youngest siblings."""
    paths = _running(replay)
    if 0 not in replay.blocks or rows < 1:
        return
    lines = list(_lines(replay, paths, glyphs))
    if len(lines) > rows:
        hidden = len(lines) - rows + 1
        lines = [*lines[: rows - 1], Text(f"{glyphs.more} {hidden:,} more lines", "dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis" if glyphs is UNICODE else "crop")
        yield line


def _running(replay: Replay) -> dict[int, None]:
    """Blocks on the paths of the running leaves; after the answer, on its path."""
    leaves = replay.running if replay.answered is None else replay.answered.path[-1:]
    found: dict[int, None] = {}
    for leaf in leaves:
        node: int | None = leaf
        while node is not None and node in replay.blocks and node not in found:
            found[node] = None
            node = replay.blocks[node].parent
    return found


def _lines(replay: Replay, paths: dict[int, None], glyphs: Glyphs) -> Iterator[Text]:
    """The tree from its root; identical siblings off the running paths share a line."""
    ahead: list[Text | _Row] = [_Row(0, 1, "", "")]
    while ahead:
        row = ahead.pop()
        if isinstance(row, Text):
            yield row
            continue
        running = row.node in paths
        yield _line(replay.blocks[row.node], row.times, row.stem, running, glyphs)
        if running or row.node == 0:
            ahead += reversed(list(_below(replay, row, paths, glyphs)))


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the tree.

    Attributes:
        node: the block it shows.
        times: number of identical siblings it stands for.
        stem: what precedes it.
        below: what precedes the lines of its children.
    """

    node: int
    times: int
    stem: str
    below: str


def _below(
    replay: Replay, row: _Row, paths: dict[int, None], glyphs: Glyphs
) -> Iterator[Text | _Row]:
    """The lines of a block's children: all on the running paths, and the youngest of the others."""
    children = replay.blocks[row.node].children
    on = [(child, 1) for child in children if child in paths]
    groups = identical_siblings(replay.blocks, [child for child in children if child not in paths])
    groups.sort(key=lambda group: group[-1])
    hidden = sum(len(group) for group in groups[:-MOST_SIBLINGS])
    shown = sorted([*on, *((group[0], len(group)) for group in groups[-MOST_SIBLINGS:])])
    for number, (child, times) in enumerate(shown):
        last = number == len(shown) - 1 and not hidden
        turn, further = (glyphs.last, "    ") if last else (glyphs.branch, glyphs.bar)
        yield _Row(child, times, row.below + turn, row.below + further)
    if hidden:
        yield Text(f"{row.below}{glyphs.last}({glyphs.more} {hidden:,} more)", "dim")


def _line(block: Block, times: int, stem: str, running: bool, glyphs: Glyphs) -> Text:
    """One block: number of identical siblings, resident part, value, beginning of its text."""
    if block.state is NodeState.OPEN:
        cells = glyphs.more.ljust(CELLS)[:CELLS]
    else:
        cells = bar(block.resident / block.tokens if block.tokens else 0.0, CELLS, glyphs)
    marks = [f"{glyphs.times}{times:,}"] if times > 1 else []
    if block.verified:
        marks.append(f"{glyphs.verified} v={block.value:.2f}")
    if block.state is NodeState.PRUNED:
        marks.append(f"{glyphs.pruned} pruned")
    if block.state is NodeState.TERMINAL:
        answer = "" if block.answer is None else plain(block.answer, glyphs)
        marks.append(f"{glyphs.answer} {answer}".rstrip())
    style = "bold" if running else ("dim" if block.state is NodeState.PRUNED else "")
    line = Text().append(stem, "dim")  # as a base style it would dim the whole line
    line.append(f"#{block.id} ", style)
    line.append(cells, "blue")
    line.append(" ".join(["", *marks, plain(block.text, glyphs)]), style)
    return line


def plain(text: str, glyphs: Glyphs) -> str:
    """The beginning of a text on one line; what the terminal cannot show, or would obey, is not in
    it."""
    line = " ".join(text[:MOST_CHARACTERS].split())
    line = "".join(each if each.isprintable() else " " for each in line)
    return line.encode("ascii", "replace").decode("ascii") if glyphs is ASCII else line


def identical_siblings(blocks: Mapping[int, Block], nodes: Iterable[int]) -> list[tuple[int, ...]]:
    """Groups of identical siblings, in the order of their first members.

    Spaces around a text do not count. An open block, and a block without text, is identical to no
    other: its text is not known.
    """
    groups: dict[object, list[int]] = {}
    for node in nodes:
        block = blocks[node]
        text = block.text.strip()
        known = text and block.state is not NodeState.OPEN
        key = (block.parent, text, block.state, block.answer) if known else node
        groups.setdefault(key, []).append(node)
    return [tuple(group) for group in groups.values()]
