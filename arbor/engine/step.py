"""Stepper: one ragged forward at a time, for all operations in progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from arbor.engine.ahead import Ahead
from arbor.engine.decoding import Decoding
from arbor.engine.forest_state import ForestState
from arbor.engine.forward_pass import DecodeBatch, ForwardPasses, Part
from arbor.engine.mode import Rules
from arbor.engine.open_tree import OpenTree
from arbor.engine.operation import NO_LOGITS, Asking, Growing, Operation, Reading, Row, Work
from arbor.engine.rehydration import Placed, Rehydration
from arbor.engine.residency import DoesNotFit, Residency
from arbor.engine.scheduler import MARGIN, Joined, Scheduler, Schedulers, is_part
from arbor.errors import ArborError, BudgetInfeasible
from arbor.events import ForwardKind, Limited
from arbor.forest import by_tree
from arbor.model.plan import Segment
from arbor.tree import Node, NodeState, ThoughtTree, paths_of

NOTHING = Joined()  # where the schedulers were not asked


class Stepper:
    """Works on all operations at once: rows join and leave at every step.

    A step admits what fits, gives slots to what its paths miss, runs one forward and hands out its
    results. Prefill, rehydration and questions ride along with the rows that decode. A row joins
    this forward if its path is complete, else the next one. Where each search has a budget of its
    own, room is made within each by itself (`Schedulers.groups`), and the forward serves all.

    Each step is a transaction: after a failure nothing holds KV that was not computed, and
    operations that have no part in the failure go on.
    """

    def __init__(
        self,
        state: ForestState,
        rules: Rules,
        residency: Residency,
        forwards: ForwardPasses,
        rehydration: Rehydration,
        decoding: Decoding,
        schedulers: Schedulers,
    ) -> None:
        self._state = state
        self._memory = state.memory
        self._rules = rules
        self._residency = residency
        self._forwards = forwards
        self._rehydration = rehydration
        self._decoding = decoding
        self._schedulers = schedulers
        self._batch = DecodeBatch(self._memory, forwards.runner.layer_count, forwards.levels)
        self._ahead: Ahead | None = None  # where nothing would wait while it runs
        if forwards.may_run_ahead:
            self._ahead = Ahead(self._memory, forwards, self._batch)
        self._changed = True  # the rows that decode, or what they read
        self._ready: list[tuple[Scheduler, int]] = []  # how many of each budget are in the batch
        # of the step in progress: what joined, and the logits where rows of it begin
        self._joined = NOTHING
        self._placed = Placed()
        self._known: dict[Node, Tensor] = {}
        self._serving: Scheduler | None = None  # the budget in which room is being made

    def begin(self, operation: Operation) -> None:
        """Take an operation, all of whose work waits."""
        operation.left = len(operation.waiting)
        if operation.left:
            self._schedulers.take(operation)
            self._report_limit(operation.opened)
            if isinstance(operation, Growing) and operation.opened.run.interrupted():
                self._interrupt(operation)

    @property
    def busy(self) -> bool:
        """Whether operations are in progress."""
        return bool(self._schedulers.operations)

    def operations_of(self, opened: OpenTree) -> list[Operation]:
        """The operations of a tree that are in progress."""
        return [each for each in self._schedulers.operations if each.opened is opened]

    def cancel(self, operations: Iterable[Operation], error: BaseException) -> None:
        """End operations that are in progress.

        What was chosen for their blocks and never computed is dropped. After an `ArborError` the
        blocks are PRUNED and hold nothing; after anything else they are as they were left.
        """
        for operation in list(operations):
            if operation in self._schedulers.operations:
                self._end(operation, error)
        if not self._schedulers.operations:
            self._hold_ready()  # nothing of work that has ended

    def abandon(self, interruption: BaseException) -> None:
        """End the operations in progress, and leave everything else as it is."""
        for operation in self._schedulers.operations:
            operation.error = operation.error or interruption

    def step(self) -> None:
        """One forward for all operations in progress; none if there are none.

        Where nothing can join, the schedulers are not asked, and nothing is laid out but the batch.
        """
        operations = self._schedulers.operations
        if not operations:
            return
        joining = True
        visited: list[Node] = []
        try:
            groups = self._schedulers.groups
            asking = [group for group in groups if group.asks and group.may_admit()]
            if asking:
                self.drop_ahead()
                self._join(asking)
            joining = False
            visited = [visit.node for visit in self._joined.visits]
            self._forward()
        except Exception as failure:
            error = self._forwards.explained(failure, _kind(operations))
            work = [*self._joined]
            if not (joining and work):
                # those of the batch that have ended left the schedulers before the others go on
                work = [*self._batch.rows, *self._schedulers.rows, *work]
            concerned = list(dict.fromkeys(each.operation for each in work)) or list(operations)
            if self._serving is not None:  # only searches that share that budget are concerned
                concerned = [each for each in concerned if each in self._serving.operations]
            self._undo()
            visited = []
            if error is not failure:
                error.__cause__ = failure
            if not concerned:  # nothing would end, and the next step would fail alike
                raise error from error.__cause__
            if joining:  # the others are tried again without the youngest
                concerned = [max(concerned, key=lambda operation: operation.order)]
            self.cancel(concerned, error)
        if self._joined is not NOTHING:
            self._clear()
        self._hand_on_failures()
        if self._residency.acts_by_time:
            self._tick(visited)
        if self._state.budgets_move:
            self.keep_within()
        if not self._schedulers.operations:
            self._hold_ready()  # nothing of work that has ended

    # Before the forward

    def _join(self, asking: Sequence[Scheduler]) -> None:
        """Admit what fits within some budgets, and give slots to what its paths miss."""
        admitted = [(group, list(group.rows), group.admit()) for group in asking]
        admitted = [each for each in admitted if each[2]]
        joined = self._joined = Joined.of([mine for _, _, mine in admitted])
        if not joined:
            return
        for operation in self._schedulers.operations:
            if isinstance(operation, Growing) and operation.waiting:
                operation.divided = True
        for opened in dict.fromkeys(work.operation.opened for work in joined):
            upcoming = [self._upcoming(each) for each in self.operations_of(opened)]
            opened.upcoming = [wave for waves in upcoming for wave in waves]
        for self._serving, _, mine in admitted:
            reserve = len(self._serving.rows) + mine.asked
            self._rehydration.prepare(mine.begins, want=mine.fresh, reserve=reserve)
        for self._serving, running, mine in admitted:
            self._placed.add(self._place(self._serving, running, mine))
        self._serving = None
        if self._placed.moved:
            before = [row for _, running, _ in admitted for row in running]
            self._decoding.look_back([row for row in before if row.started])
            self._changed = True
        for question in joined.questions:
            question.slots = self._memory.borrow(question.tokens, question.node)
        self._state.used(paths_of(joined.begins))
        logits = self._state.logits
        self._known = {leaf: logits[leaf.row] for leaf in joined.fresh if leaf.row in logits}
        written = {node.row for node in self._placed.written}
        self._start(
            [
                row
                for row in joined.rows
                if (row.pending is not None or row.leaf in self._known)
                and not any(node.row in written for node in row.begin.path)
            ]
        )

    def _place(self, group: Scheduler, running: Sequence[Row], mine: Joined) -> Placed:
        """Give slots to what the paths of a budget's work miss. The scheduler expects what fits;
        what does not waits again, the youngest first.

        Args:
            running: the rows that decoded before this work joined.
            mine: the work; what waits again is taken out.

        Raises:
            BudgetInfeasible: a single path does not fit, and nothing else runs.
        """
        while mine:
            try:
                return self._rehydration.place(
                    mine.begins,
                    want=mine.fresh,
                    reserve=len(group.rows) + mine.asked,
                    running=[row.node for row in running],
                    most=next((visit.most for visit in mine.visits), None),
                )
            except DoesNotFit as error:
                if len(list(mine)) == 1 and not running:
                    slots = group.account.slots
                    what = f"{self._rules.must_fit} with its next block"
                    raise BudgetInfeasible(slots + error.short, slots, what) from error
                youngest = mine.youngest
                mine.remove(youngest)
                self._joined.remove(youngest)
                group.wait_again([youngest])
        return Placed()

    def _start(self, rows: Sequence[Row]) -> None:
        """Let rows whose paths are complete begin or go on."""
        if rows:
            fresh = [row for row in rows if row.pending is None]
            self._changed = True
            self._decoding.start(rows)
            watched = self._decoding.choose(fresh, [self._known[row.leaf] for row in fresh])
            if watched:
                self._decoding.compare(watched)

    def _upcoming(self, operation: Operation) -> list[list[Node]]:
        """Blocks at whose end the waiting work begins, as much at a time as fits."""
        if isinstance(operation, Asking):
            nodes = [work.leaf for work in operation.waiting]
            extra = operation.extra
            return [[nodes[i] for i in wave] for wave in self._rules.waves(nodes, extra)]
        width = max(1, sum(row.operation is operation for row in self._schedulers.rows))
        leaves = [work.leaf for work in operation.waiting]
        return [list(dict.fromkeys(leaves[at : at + width])) for at in range(0, len(leaves), width)]

    # The forward

    def _forward(self) -> None:
        """Run the rows that have a token to compute, with all that joined."""
        joined = None if self._joined is NOTHING else self._joined
        if self._changed:
            self._hold_ready()
        ahead = self._ahead
        if ahead is not None and not ahead.waiting:
            ahead = None
        if ahead is None and self._make_room():
            self._hold_ready()
        rows = self._batch.rows
        parts = self._parts() if joined else []
        if ahead is not None:
            logits = ahead.take()
        elif parts:
            logits = self._forwards.run(parts, self._batch if rows else None)
        elif rows:
            logits = self._forwards.step(self._batch)
        else:  # paths that are complete already
            logits = NO_LOGITS
        if joined:
            self._hand_out(parts, logits[len(rows) :])
            logits = logits[: len(rows)]
        if rows:
            self._after(rows, logits)
        if joined:
            running = set(self._schedulers.rows)
            ready = [row for row in joined.rows if not row.started and row in running]
            self._start([row for row in ready if row.operation.error is None])
        for operation in self._schedulers.operations:
            if not operation.left:
                self._finish(operation)

    def _hold_ready(self) -> None:
        """Have the batch hold the rows with a token to compute."""
        self._ready, rows = [], []
        for group in self._schedulers.groups:
            mine = [row for row in group.rows if row.started and row.operation.error is None]
            if mine:  # else its search may be closed before the batch changes
                self._ready.append((group, len(mine)))
            rows += mine
        self._batch.hold(rows)
        self._changed = False

    def _parts(self) -> list[Part]:
        """What joined, as segments by tree."""
        parts: dict[ThoughtTree, Part] = {}
        placed = self._placed
        for segment, owner in zip(placed.segments, placed.owners, strict=True):
            kind: ForwardKind = "rehydrate" if owner.tree in placed.again else "prefill"
            parts.setdefault(owner.tree, Part(owner.tree, kind, [])).segments.append(segment)
        questions = self._joined.questions
        contexts = self._state.contexts([question.node for question in questions])
        for question, context in zip(questions, contexts, strict=True):
            end, count = question.node.end, len(question.tokens)
            assert question.slots is not None
            tree = question.node.tree
            part = parts.setdefault(tree, Part(tree, "verify", []))
            part.kind = "verify"
            if question.way is not None:
                part.ways[len(part.segments)] = question.way
            part.segments.append(
                Segment(
                    context=context,
                    tokens=question.tokens,
                    positions=np.arange(end, end + count),
                    tail=question.slots,
                    write=question.slots,
                    logits=1,
                    # what it attends to depends on where it leaves: it is not observed
                    again=question.way is not None,
                )
            )
        return list(parts.values())

    def _hand_out(self, parts: Sequence[Part], logits: Tensor) -> None:
        """Hand out the results of what joined.

        Args:
            logits: [n, V] float32, part by part: after wanted blocks, after questions.
        """
        joined, placed = self._joined, self._placed
        wanted = by_tree(placed.wanted)
        at = 0
        for part in parts:
            nodes = wanted.get(part.tree, [])
            rows = logits[at : at + len(nodes)]
            self._state.logits.remember([node.row for node in nodes], rows)
            self._known.update(zip(nodes, rows, strict=True))
            at += len(nodes)
            for question in joined.questions:
                if question.node.tree is part.tree:
                    assert isinstance(question.operation, Asking)
                    question.operation.answer(question, logits[at])
                    if question.operation.is_early:
                        question.operation.opened.read_early.add(question.node.id)
                    at += 1
        for visit in joined.visits:
            if isinstance(visit.operation, Reading) and not is_part(visit):
                visit.operation.answers[visit.place] = self._known[visit.node]
        self._state.mark_computed(placed.written)
        self._rehydration.computed()
        for question in joined.questions:
            assert question.slots is not None
            self._memory.free_borrowed(question.slots)
        done: list[Work] = [*joined.questions, *joined.visits]
        self._schedulers.leave(done)
        for work in done:
            work.operation.left -= not is_part(work)
        joined.questions, joined.visits = [], []  # they do not wait again if the step fails later

    # Room for the next tokens

    def _make_room(self) -> bool:
        """Make room for the next tokens of the rows in each budget that has none left; what joined
        this forward has reserved it.

        Returns:
            whether the rows or their contexts have changed.
        """
        reserved: set[Scheduler] = set()
        if self._joined is not NOTHING:
            reserved = {self._schedulers.of(work.operation) for work in self._joined}
        changed = False
        for group, rows in self._ready:
            if group not in reserved and group.account.free < rows:
                self._serving = group
                changed |= self._make_room_in(group)
        self._serving = None
        return changed

    def _make_room_in(self, group: Scheduler) -> bool:
        """Make room for the next tokens of each row: `MARGIN` where something has to leave anyway
        and can, one in any case.

        Rows wait again where what is pinned leaves no room for all; one always fits.

        Returns:
            whether the rows or their contexts have changed.
        """
        preempted = False
        while len(group.rows) > 1 and self._rules.is_crowded(group.nodes):
            self._decoding.suspend(group.preempt())
            preempted = True
        rows, nodes = group.rows, group.nodes
        slots, pinned = group.account.slots, self._rules.pinned(nodes)
        most = slots - pinned
        if most < len(rows):
            what = f"{self._rules.must_fit} with its next token"
            raise BudgetInfeasible(pinned + len(rows), slots, what)
        margin = 1 if group.keeps() else MARGIN
        try:
            lost = self._residency.fit(min(margin * len(rows), most), nodes, "pressure")
        except BudgetInfeasible:  # the policy gives up less than that
            lost = self._residency.fit(len(rows), nodes, "pressure")
        if lost:
            self._decoding.look_back(rows)
        return preempted or lost

    def drop(self, tree: ThoughtTree) -> None:
        """After a tree was dropped: its part of a shared budget is gone."""
        self._schedulers.forget(tree, list(self._state.trees))
        self.keep_within()

    def keep_within(self) -> None:
        """Make room where a budget has become smaller than what is held: blocks were shorter than
        expected, or another search has ended."""
        for opened in list(self._state.trees.values()):
            if opened.account.part is None or opened.account.free >= 0:
                continue
            self.drop_ahead()
            group = self._schedulers.within(opened.tree)
            if group is not None and group.rows:
                self._serving = group
                self._changed |= self._make_room_in(group)
                self._serving = None
            else:
                last = None if group is None else group.focus
                self._residency.fit(0, [opened.tree.root if last is None else last], "close")

    def _tick(self, visited: Sequence[Node]) -> None:
        """Let the policy act at its own time, after a step with rows that decode.

        Args:
            visited: ends of the paths that the step has completed, which stay.
        """
        own = self._state.own_budgets
        for group in self._schedulers.groups:
            if group.rows:
                tree = group.rows[0].node.tree
                self._tick_in(group, [node for node in visited if not own or node.tree is tree])

    def _tick_in(self, group: Scheduler, visited: Sequence[Node]) -> None:
        """Let the policy act within one budget. A failure of the policy ends the last of the
        operations whose blocks decode."""
        rows, nodes = group.rows, [*group.nodes, *visited]
        room = self._residency.due(nodes)
        try:
            lost = self._residency.assign(nodes)
            if room is not None:
                pinned = self._rules.pinned(nodes)
                free = group.account.slots - max(room, pinned)
                lost = self._residency.fit(free, nodes, "clock") or lost
        except BudgetInfeasible:  # it keeps more than that, and room has not run out
            return
        except Exception as error:
            last = max(rows, key=lambda row: row.operation.order)
            self.cancel([last.operation], error)
            return
        if lost:
            self._decoding.look_back(rows)
            self._changed = True

    # After the forward

    def _after(self, rows: Sequence[Row], logits: Tensor) -> None:
        """End the blocks that have reached their boundary, and choose the others' next tokens.

        Args:
            logits: [n, V] float32, after their last tokens.
        """
        done: list[int] = []
        going: list[int] = []
        for i, row in enumerate(rows):
            row.node.logprob += row.logprob
            if len(row.node.logprobs) < len(row.node.tokens):  # it was not given
                row.node.logprobs.append(row.logprob)
            row.node.top1 += row.top1
            (going if row.stop is None else done).append(i)
        if done:
            self._changed = True
            self._decoding.end([rows[i] for i in done], logits[done])
        for tree in self._batch.trees:
            opened = self._state.trees[tree]
            if opened.run.detail != "events":
                self._forwards.report_steps(opened)
        for operation in self._schedulers.operations:
            if (
                isinstance(operation, Growing)
                and operation.left
                and operation.opened.run.interrupted()
            ):
                self._interrupt(operation)
        some = [i for i in going if rows[i].operation.left and rows[i].operation.error is None]
        if some:
            some_logits = logits if len(some) == len(rows) else logits[some]
            chosen = [rows[i] for i in some]
            ahead = self._ahead
            if ahead is not None and not (len(some) == len(rows) and self._may_run_ahead()):
                ahead = None
            watched = self._decoding.choose(chosen, some_logits, ahead)
            if watched and self._decoding.compare(watched):
                self._changed = True

    def _may_run_ahead(self) -> bool:
        """Whether the next step needs nothing of the host but the tokens of this one's rows: they
        stay, nothing joins or leaves, and each has a free slot."""
        return (
            self._joined is NOTHING
            and not self._changed
            and not self._residency.acts_by_time
            and all(group.account.free >= rows for group, rows in self._ready)
            and not any(group.asks and group.may_admit() for group in self._schedulers.groups)
            and not any(row.siblings is not None for row in self._batch.rows)
        )

    def drop_ahead(self) -> None:
        """Have no step ahead."""
        if self._ahead is not None:
            self._ahead.drop()

    def _interrupt(self, operation: Growing) -> None:
        """Give up the unfinished blocks of an operation."""
        rows = [row for row in self._schedulers.rows if row.operation is operation]
        waiting = [work.node for work in (*operation.waiting, *operation.held)]
        self._leave(operation)
        self._decoding.cut([*(row.node for row in rows), *waiting])

    def _leave(self, operation: Operation) -> None:
        """Remove all work of an operation."""
        self.drop_ahead()
        rows = [row for row in self._schedulers.rows if row.operation is operation]
        self._changed = self._changed or bool(rows)
        self._schedulers.leave(rows)
        operation.waiting.clear()
        if isinstance(operation, Growing):
            operation.held.clear()
        operation.left = 0

    def _finish(self, operation: Operation) -> None:
        """End an operation all of whose work is done."""
        self._forwards.report_steps(operation.opened)
        self._report_limit(operation.opened)
        if operation.error is None and operation.opened.failure is None:
            self._schedulers.drop(operation)

    def _report_limit(self, opened: OpenTree) -> None:
        """Report what a budget that is a part of full retention allows."""
        part = opened.account.part
        if part is not None and part.part < 1:
            most, expansion = part.report()
            opened.emit(Limited(most, opened.retained.peak, expansion))

    # Failures

    def _undo(self) -> None:
        """Take back the step in progress: what joined waits again."""
        self._rehydration.undo()
        for row in self._joined.rows:
            if row in self._schedulers.rows:
                self._decoding.withdraw(row)
        running = set(self._schedulers.rows)
        self._schedulers.wait_again(
            work for work in self._joined if not isinstance(work, Row) or work in running
        )
        self._changed = True
        self._clear()

    def _clear(self) -> None:
        """Forget the step in progress."""
        self._joined, self._placed, self._known = NOTHING, Placed(), {}
        self._serving = None

    def _hand_on_failures(self) -> None:
        """End the operations whose listeners or token sources failed."""
        for operation in self._schedulers.operations:
            error = operation.error or operation.opened.failure
            if error is not None:
                operation.opened.failure = None
                self._end(operation, error)
            elif not operation.left:  # the failure has ended another one of its tree
                self._schedulers.drop(operation)

    def _end(self, operation: Operation, error: BaseException) -> None:
        rows = [row for row in self._schedulers.rows if row.operation is operation]
        self._leave(operation)
        self._schedulers.drop(operation)
        self._decoding.drop_chosen(rows)
        operation.error = error
        if isinstance(error, ArborError) and isinstance(operation, Growing):
            self._forwards.report_steps(operation.opened)
            self._give_up(operation.children)

    def _give_up(self, children: Sequence[Node]) -> None:
        """Blocks of an operation that cannot be finished hold nothing any more, and none of them is
        open."""
        self._decoding.cut([child for child in children if child.state is NodeState.OPEN])
        for child in children:
            child.state = NodeState.PRUNED
        self.forget(children)

    def forget(self, nodes: Sequence[Node]) -> None:
        """Free the KV of blocks, and report it as given up."""
        lost: dict[Node, int] = {}
        for node in nodes:
            self._state.logits.pop(node.row, None)
            count = int(np.count_nonzero(node.span.resident))
            if count:
                lost[node] = count
        for tree, group in by_tree(nodes).items():
            self._state.trees[tree].retained.give_up(group)
        self._memory.free_blocks(nodes)
        self._state.changed(nodes)
        self._state.sharing_changed()
        self._state.report_evicted(lost, "close")


def _kind(operations: Sequence[Operation]) -> ForwardKind:
    """What an out-of-memory error outside a forward is named after."""
    if any(isinstance(operation, Growing) for operation in operations):
        return "decode"
    return "verify" if any(isinstance(each, Asking) for each in operations) else "prefill"
