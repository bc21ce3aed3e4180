"""Scheduler: which work of the operations in progress takes part in the next forward."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from arbor.engine.open_tree import OpenTree
from arbor.engine.operation import Operation, Question, Row, Visit, Work
from arbor.engine.retained import Account
from arbor.forest import Overlap
from arbor.memory import KVMemory
from arbor.tree import Node, NodeState, ThoughtTree

# tokens of each row that room is made for at once while blocks decode (ArborKV's delta)
MARGIN = 4
# tokens of prompts, rehydrations and questions that join one forward at most; more wait for the
# next one, so that neither its activations nor the wait of the rows that decode grow with the
# number of problems or the length of a prompt (chunked prefill)
MOST_NEW = 8192
# the same where attention reads host memory: until they are merged, each row has a result for every
# chunk of its keys
MOST_STREAMED = 256
# orders rows by their operations, then by when they joined
BY_AGE = attrgetter("operation.order", "joined")


@dataclass(slots=True)
class Joined:
    """The work that joins the next forward."""

    rows: list[Row] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)

    @classmethod
    def of(cls, several: Iterable[Joined]) -> Joined:
        """All of these."""
        joined = cls()
        for each in several:
            joined.rows += each.rows
            joined.questions += each.questions
            joined.visits += each.visits
        return joined

    @property
    def begins(self) -> list[Node]:
        """Ends of the paths that it needs."""
        rows = [row.begin for row in self.rows]
        questions = [question.node for question in self.questions]
        return [*rows, *questions, *(visit.node for visit in self.visits)]

    @property
    def fresh(self) -> list[Node]:
        """Blocks after whose last token logits are wanted."""
        rows = [row.leaf for row in self.rows if row.pending is None]
        return rows + [visit.node for visit in self.visits if visit.most is None]

    @property
    def asked(self) -> int:
        """Tokens of its questions."""
        return sum(len(question.tokens) for question in self.questions)

    def __bool__(self) -> bool:
        return bool(self.rows or self.questions or self.visits)

    def __iter__(self) -> Iterator[Work]:
        yield from self.rows
        yield from self.questions
        yield from self.visits

    def add(self, work: Work) -> None:
        """Take one more."""
        if isinstance(work, Row):
            self.rows.append(work)
        elif isinstance(work, Question):
            self.questions.append(work)
        else:
            self.visits.append(work)

    @property
    def youngest(self) -> Work:
        """The work of the latest place in the youngest operation."""
        return max(self, key=lambda each: (each.operation.order, each.place))

    def remove(self, work: Work) -> None:
        """Take one out."""
        self.rows = [each for each in self.rows if each is not work]
        self.questions = [each for each in self.questions if each is not work]
        self.visits = [each for each in self.visits if each is not work]


class Scheduler:
    """Rows that decode now within one budget, and the work that waits.

    Work joins operation by operation (`Operation.order`), and within one in depth-first order, so
    that blocks which share a path run together. It joins as soon as it can be expected to fit, with
    the paths of all that run, until the others have ended; where blocks grow longer than expected,
    the last row of the last operation has to wait again (`preempt`).

    In an amount, no work overtakes that of a tree opened earlier: taking turns would let every tree
    wait for the room of all others, and with eight searches in a small budget 1.7 times as many
    tokens are computed again (docs/experiments/server.md). A part of full retention grows with
    the trees, so there the oldest operation of any tree comes first: one search after the other
    would have the room of one (docs/experiments/budget.md).

    Args:
        account: the budget, and what is free of it.
        keeps: asked whether nothing has to leave, so that work has only what is free; by default
            never.
        overlap: counts tokens of blocks that are on the device once for several of them; None:
            there are none.

    Attributes:
        account: the budget.
        operations: in progress, in their order.
        rows: blocks that decode, operation by operation.
        keeps: asked whether nothing has to leave: then no work joins for which something would.
        asks: whether work waits, or has come or gone since `admit` was asked.
        focus: the block whose expansion is in progress, or was the last one.
    """

    _chunks = True  # a long path is computed in several forwards
    _expands = True  # one expansion is always given room
    _remembers = True  # whether work fits depends on the budget and the blocks' lengths alone

    def __init__(
        self,
        account: Account,
        *,
        keeps: Callable[[], bool] = bool,
        overlap: Overlap | None = None,
    ) -> None:
        self.operations: list[Operation] = []
        self.rows: list[Row] = []
        self.account = account
        self.keeps = keeps
        self.asks = True
        # the work that has to wait though no other joins, and what its path takes with all others
        self._refused: tuple[Work, int] | None = None
        self._overlap = overlap
        self._joins = 0
        self._taken: set[Work] = set()  # what runs or joins, whose paths are counted
        self._users: dict[int, int] = {}  # work by the row of each block on its path
        self._paths = 0  # tokens of these blocks
        self._ends: int | None = None  # tokens of the rows' blocks at their ends, while work joins
        self._asked = 0  # tokens of the questions that join the next forward
        self._missing = 0  # tokens that are computed before what joined for the next forward runs
        self._slots = 0  # of the account, as work began to join
        self.focus: Node | None = None
        self._question_tokens = 0  # of the longest question that waits or joined
        if account.part is not None and self._expands:
            account.part.least = self.expansion
        self._begun = 0  # the same of blocks of rows that joined, where `_missing` lacks them

    @property
    def nodes(self) -> list[Node]:
        """The blocks that decode: ends of the running paths."""
        return [row.node for row in self.rows]

    def take(self, operation: Operation) -> None:
        """Take an operation, at its place in the order."""
        insort(self.operations, operation, key=lambda each: each.order)
        self.asks, self._refused = True, None

    def may_admit(self) -> bool:
        """Whether `admit` may find something: work has come or gone, or what had to wait would fit
        by now. Where it is False, `admit` would change nothing."""
        if self._refused is None:
            return self.asks
        work, held = self._refused
        room = self.account.slots - held
        if isinstance(work, Row):
            return most_held((*self.rows, work)) <= room
        return _question(work) + sum(len(row.node.tokens) + 1 for row in self.rows) <= room

    def let_go(self, operation: Operation) -> None:
        """Let an operation go, with what a failure left of its work."""
        self.operations.remove(operation)
        self.leave([work for work in self._taken if work.operation is operation])

    def admit(self) -> Joined:
        """The work that joins now; one piece in any case if nothing runs."""
        joined = Joined()
        self.asks, self._refused = True, None
        self._asked = self._missing = self._begun = 0
        self._ends = None  # rows have grown
        self._look()
        self._slots = self.account.slots  # a part takes long to count, and moves with the tree
        keeps = self.keeps()
        for operation in self.operations:
            while operation.waiting:
                work = operation.waiting[0]
                fresh = [node for node in work.leaf.path if node.row not in self._users]
                new = self._missing + self._new(fresh) + self._own(work)
                full = joined and new + self._asked + _question(work) > self._most_new
                if not full and (self.rows or joined):
                    full = keeps and not self._is_free(work, new)
                    full = full or not self._fits(work, joined, fresh, new)
                if full:
                    self._in_order(joined)
                    if self._remembers and not joined:
                        held = self._paths + sum(len(node.tokens) for node in fresh)
                        self._refused = work, held - self._shared(fresh)
                    return joined
                if (part := self._part(work, new)) is not None:
                    self._take(
                        part, [each for each in part.leaf.path if each.row not in self._users]
                    )
                    joined.add(part)
                    return joined
                operation.waiting.popleft()
                self._take(work, fresh)
                self._missing = new
                self._begun += self._apart(work)
                joined.add(work)
        self._in_order(joined)
        self.asks = bool(joined)  # what has joined is looked at once more: it may be the oldest now
        return joined

    def leave(self, work: Iterable[Work]) -> None:
        """Remove work that is done; what has left already changes nothing."""
        self.asks, self._refused = True, None
        gone = set(work)
        if any(isinstance(each, Row) for each in gone):
            self.rows = [row for row in self.rows if row not in gone]
        for each in gone & self._taken:
            self._taken.remove(each)
            self._release(each)

    def wait_again(self, work: Iterable[Work]) -> None:
        """Put work back, first in the queue of its operation."""
        again = list(work)
        self.leave(again)
        self.resume(again)

    def resume(self, work: Iterable[Work]) -> None:
        """Let work that has left wait, first in the queue of its operation."""
        self.asks, self._refused = True, None
        for each in sorted(work, key=lambda each: each.place, reverse=True):
            each.operation.waiting.appendleft(each)

    def preempt(self) -> Row:
        """The last row of the last operation waits again."""
        row = max(self.rows, key=BY_AGE)
        self.wait_again([row])
        return row

    def _look(self) -> None:
        """Set whose expansion is in progress: that of the work which never has to wait again."""
        waiting = [each.waiting[0] for each in self.operations if each.waiting]
        first = waiting[0] if waiting else None
        oldest = min(self.rows, key=BY_AGE) if self.rows else None
        # a question that is older than all rows: what it is about is still there
        asks = isinstance(first, Question) and (
            oldest is None or first.operation.order < oldest.operation.order
        )
        if oldest is not None and not asks:
            self.focus = oldest.leaf
        elif first is not None:
            self.focus = _parent(first)
        if oldest is not None or first is not None:
            self._question_tokens = max(map(_question, waiting), default=0)

    def forget(self, tree: ThoughtTree, others: Sequence[ThoughtTree]) -> None:
        """Expand nothing of a tree that was dropped.

        Args:
            others: that are open, the first opened first.
        """
        self.asks, self._refused = True, None
        if self.focus is not None and self.focus.tree is tree:
            self.focus, self._question_tokens = others[0].root if others else None, 0
            self._look()

    def expansion(self) -> int:
        """Tokens of the path to the block that is being expanded, of its children, and of one
        question that waits: the least that lets a search go on."""
        if self.focus is None:
            return 0
        running = {row.node.row for row in self.rows if row.started}
        # a question goes first; the oldest row goes on in any case
        oldest = min(self.rows, key=BY_AGE).leaf if self.rows else self.focus
        return self._question_tokens + max(
            _expanded(leaf, running) for leaf in dict.fromkeys((self.focus, oldest))
        )

    def _is_expansion(self, work: Work, joined: Joined) -> bool:
        """Whether all that runs and joins belongs to the expansion in progress, with this work."""
        if any(_parent(each) is not self.focus for each in (*self.rows, *joined, work)):
            return False
        return not (isinstance(work, Question) and (joined.questions or self.rows))

    def _in_order(self, joined: Joined) -> None:
        """Rows that share a path next to each other, also those that joined again."""
        if joined.rows:
            self.rows.sort(key=lambda row: (row.operation.order, row.place))

    @property
    def _most_new(self) -> int:
        """Tokens of prompts, rehydrations and questions that join one forward at most."""
        return MOST_NEW

    def _new(self, nodes: Sequence[Node]) -> int:
        """Tokens of blocks that are computed before their paths run."""
        return sum(len(node.tokens) - int(np.count_nonzero(node.span.resident)) for node in nodes)

    def _own(self, work: Work) -> int:
        """Tokens of a row's own block that are computed before it runs, and count as those of its
        path do: none here, where `_fits` counts them with what the row will hold."""
        return 0

    def _apart(self, work: Work) -> int:
        """Tokens of a row's own block, given or known from before, that are computed before it runs
        and that `_own` does not count."""
        return self._new([work.node]) if isinstance(work, Row) else 0

    def _part(self, work: Work, new: int) -> Visit | None:
        """The part of a path that is computed first, and alone, where it is long; else None.

        Args:
            work: needs the path.
            new: tokens of paths that the next forward would compute.
        """
        if new <= MOST_NEW or not self._chunks:
            return None
        return Visit(work.operation, work.place, work.leaf, MOST_NEW)

    def _is_free(self, work: Work, new: int) -> bool:
        """Whether there are free slots for the next forward if work joins it.

        Args:
            new: tokens of paths that the next forward computes if it joins.
        """
        rows = len(self.rows) + isinstance(work, Row)
        begun = self._begun + self._apart(work)
        return new + begun + self._asked + _question(work) + rows <= self.account.available

    def _fits(self, work: Work, joined: Joined, fresh: Sequence[Node], new: int) -> bool:
        """Whether work can be expected to fit with all that runs and joins.

        Args:
            joined: what joins before it.
            fresh: blocks of its path that are on no other, root first.
            new: tokens of paths that the next forward computes if it joins.
        """
        if self.account.part is not None and self._is_expansion(work, joined):
            return True
        room = self._slots - self._paths - self._asked
        room -= sum(len(node.tokens) for node in fresh)
        if isinstance(work, Row):
            if self._ends is None:
                self._ends = sum(map(_end, self.rows))
            # most often all blocks fit at their ends, wherever each is when others reach theirs
            if self._ends + _end(work) <= room:
                return True
            return most_held((*self.rows, work)) <= room + self._shared(fresh)
        grown = sum(len(row.node.tokens) + 1 for row in self.rows)
        if self.account.part is not None and joined.questions:
            room -= self._asked_next(work)
        return _question(work) + grown <= room + self._shared(fresh)

    def _asked_next(self, work: Work) -> int:
        """Tokens of the blocks of the expansion in progress that the next questions are about: they
        would be computed again if they left now."""
        total = 0
        for after in itertools.islice(work.operation.waiting, 1, None):
            if _parent(after) is not self.focus:
                break
            total += 0 if after.node.row in self._users else len(after.node.tokens)
        return total

    def _take(self, work: Work, fresh: Sequence[Node]) -> None:
        self._taken.add(work)
        self._paths += sum(len(node.tokens) for node in fresh)
        if self._overlap is not None:
            for node in fresh:
                self._overlap.add(node)
        for node in work.leaf.path:
            self._users[node.row] = self._users.get(node.row, 0) + 1
        if isinstance(work, Row):
            self._joins += 1
            work.joined = self._joins
            self.rows.append(work)
            if self._ends is not None:
                self._ends += _end(work)
        elif isinstance(work, Question):
            self._asked += _question(work)

    def _release(self, work: Work) -> None:
        for node in work.leaf.path:
            self._users[node.row] -= 1
            if not self._users[node.row]:
                del self._users[node.row]
                self._paths -= len(node.tokens)
                if self._overlap is not None:
                    self._overlap.remove(node)

    def _shared(self, fresh: Sequence[Node]) -> int:
        """Tokens that the blocks of all paths have in common with others, with these."""
        return 0 if self._overlap is None else self._overlap.total + self._overlap.more(fresh)


class StreamedScheduler(Scheduler):
    """Paths may be anywhere on the device and in host memory; what a forward computes is on the
    device.

    Args:
        account: the budget on the device.
        memory: has the room for running paths.
        missing: tokens of a block that are computed before its path runs.
        keeps: as in `Scheduler`.
    """

    _expands = _remembers = False

    def __init__(
        self,
        account: Account,
        memory: KVMemory,
        missing: Callable[[Node], int],
        keeps: Callable[[], bool],
    ) -> None:
        super().__init__(account, keeps=keeps)
        self._memory = memory
        self._missing_of = missing

    def _new(self, nodes: Sequence[Node]) -> int:
        return sum(map(self._missing_of, nodes))

    @property
    def _most_new(self) -> int:
        return max(1, min(MOST_STREAMED, self.account.slots // 2))

    def _own(self, work: Work) -> int:
        begin = _begin(work)
        return self._new([begin]) if begin is not work.leaf else 0

    def _apart(self, work: Work) -> int:
        return 0

    def _part(self, work: Work, new: int) -> Visit | None:
        most = self._most_new
        if new + _question(work) <= most or not new:
            return None
        return Visit(work.operation, work.place, _begin(work), most)

    def _fits(self, work: Work, joined: Joined, fresh: Sequence[Node], new: int) -> bool:
        paths = self._paths + sum(len(node.tokens) for node in fresh) + self._asked
        asked = _question(work)
        rows = [*self.rows, work] if isinstance(work, Row) else self.rows
        on_device = new + self._asked + asked + len(rows) * 2 * MARGIN
        whole = paths + asked + most_held(rows)
        return whole <= self._memory.path_room and on_device <= self.account.slots


class WaveScheduler(Scheduler):
    """Work joins in waves, each of which takes at most half of the budget at its longest."""

    _chunks = False  # see `Rules.pieces`
    _expands = _remembers = False

    def admit(self) -> Joined:
        """The next wave, once the last one has ended."""
        if not self.rows:
            return super().admit()
        self.asks = False  # until some rows have left
        return Joined()

    def _fits(self, work: Work, joined: Joined, fresh: Sequence[Node], new: int) -> bool:
        return 2 * sum(map(_longest, (*joined, work))) <= self.account.slots


def is_part(work: Work) -> bool:
    """Whether it computes the beginning of a path for work that waits."""
    return isinstance(work, Visit) and work.most is not None


def _expanded(leaf: Node, running: Collection[int]) -> int:
    """Tokens of the path to a block and of its children.

    Args:
        running: rows of blocks whose next token is among their tokens already.
    """
    total = leaf.end
    for child in leaf.children:
        if child.state is not NodeState.PRUNED:
            total += len(child.tokens)
            total += child.state is NodeState.OPEN and child.row not in running
    return total


def _parent(work: Work) -> Node:
    """The block whose expansion a piece of work belongs to."""
    if isinstance(work, Row):
        return work.leaf
    return work.node if work.node.parent is None else work.node.parent


def _begin(work: Work) -> Node:
    """The block that has to be complete before it runs."""
    return work.begin if isinstance(work, Row) else work.leaf


def _longest(work: Work) -> int:
    """Tokens that a piece of work needs beyond its path at most."""
    if isinstance(work, Row):
        return work.longest
    return _question(work)


def _end(row: Row) -> int:
    """Tokens that a row's block is assumed to have at its end: see `most_held`."""
    expected = row.operation.opened.lengths.expected(row.longest)
    return max(expected, len(row.node.tokens) + MARGIN)


def _question(work: Work) -> int:
    """Tokens of a question; 0 for other work."""
    return len(work.tokens) if isinstance(work, Question) else 0


def most_held(rows: Iterable[Row]) -> int:
    """Tokens that the blocks hold together at most while all of them grow, a token a step, and
    leave as they end.

    Each is assumed to end at its tree's expected length, or `MARGIN` tokens from now if it has
    almost reached it.
    """
    every = list(rows)
    if not every:
        return 0
    length = np.array([len(row.node.tokens) for row in every], np.int64)
    known: dict[tuple[Operation, int], int] = {}
    for row in every:
        key = row.operation, row.longest
        if key not in known:
            known[key] = row.operation.opened.lengths.expected(row.longest)
    expected = np.array([known[row.operation, row.longest] for row in every], np.int64)
    steps = np.maximum(expected - length, MARGIN)
    order = np.lexsort((length, steps))[::-1]
    # when a block ends, those before it in this order still run
    running = np.arange(1, len(length) + 1)
    return int((np.cumsum(length[order]) + running * steps[order]).max())


class Schedulers:
    """The schedulers of the operations in progress: one for all of them where searches share a
    budget, else one for each search, as if it were alone. All of them take part in every forward.

    Args:
        own_budgets: each search has its own; else that of the first serves all.

    Attributes:
        groups: the schedulers, those of trees opened earlier first.
        operations: all in progress, in their order; another list after each change.
    """

    def __init__(self, make: Callable[[OpenTree], Scheduler], *, own_budgets: bool) -> None:
        self._make = make
        self._own_budgets = own_budgets
        self.groups: list[Scheduler] = []
        self.operations: list[Operation] = []
        self._of: dict[ThoughtTree | None, Scheduler] = {}  # of which operations are in progress
        self._turns: list[tuple[int, ThoughtTree | None]] = []

    def _list(self) -> None:
        """List anew what there is."""
        self.groups = [self._of[tree] for _, tree in self._turns]
        self.operations = [each for group in self.groups for each in group.operations]

    @property
    def rows(self) -> list[Row]:
        """All blocks that decode, operation by operation."""
        return [row for group in self.groups for row in group.rows]

    def of(self, operation: Operation) -> Scheduler:
        """The scheduler of an operation in progress."""
        return self._of[self._key(operation)]

    def within(self, tree: ThoughtTree) -> Scheduler | None:
        """The scheduler of the budget that a tree keeps within; None: it has had no operation."""
        return self._of.get(tree if self._own_budgets else None)

    def forget(self, tree: ThoughtTree, others: Sequence[ThoughtTree]) -> None:
        """See `Scheduler.forget`."""
        group = self.within(tree)
        if group is not None:
            group.forget(tree, others)

    def take(self, operation: Operation) -> None:
        """Take an operation."""
        key = self._key(operation)
        if key not in self._of:
            self._of[key] = self._make(operation.opened)
            insort(self._turns, (operation.opened.turn, key), key=lambda each: each[0])
        self._of[key].take(operation)
        self._list()

    def drop(self, operation: Operation) -> None:
        """Let an operation go, none of whose work runs."""
        key = self._key(operation)
        self._of[key].let_go(operation)
        if self._own_budgets and not self._of[key].operations:
            del self._of[key]
            self._turns = [each for each in self._turns if each[1] is not key]
        self._list()

    def leave(self, work: Iterable[Work]) -> None:
        """Remove work that is done."""
        for group, mine in self._by_group(work):
            group.leave(mine)

    def wait_again(self, work: Iterable[Work]) -> None:
        """Put work back, first in the queue of its operation."""
        for group, mine in self._by_group(work):
            group.wait_again(mine)

    def resume(self, work: Iterable[Work]) -> None:
        """Let work that has left wait, first in the queue of its operation."""
        for group, mine in self._by_group(work):
            group.resume(mine)

    def _key(self, operation: Operation) -> ThoughtTree | None:
        return operation.opened.tree if self._own_budgets else None

    def _by_group(self, work: Iterable[Work]) -> list[tuple[Scheduler, list[Work]]]:
        found: dict[ThoughtTree | None, list[Work]] = {}
        for each in work:
            found.setdefault(self._key(each.operation), []).append(each)
        return [(self._of[key], mine) for key, mine in found.items()]
