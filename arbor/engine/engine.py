"""Engine: forward passes over the tree, each within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from itertools import zip_longest
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from torch import Tensor

from arbor.engine.beam_search import BeamSearch, BeamSettings, Hypothesis
from arbor.engine.decoding import Decoding
from arbor.engine.forest_state import ForestState
from arbor.engine.forward_pass import ForwardPasses, Part
from arbor.engine.hooks import BranchHook, OtherPrompt, PromptHook, Way
from arbor.engine.kv_view import KVView
from arbor.engine.mode import (
    Lossy,
    Mode,
    Rehydrate,
    Rules,
    Share,
    Streamed,
    StreamedLossy,
)
from arbor.engine.mode_names import SIMILAR, have_own_budgets
from arbor.engine.observer import Observer, QueryWindow
from arbor.engine.open_tree import OpenTree, RunHooks, ignore
from arbor.engine.operation import (
    NO_LOGITS,
    Asking,
    Extending,
    GivenBlock,
    Growing,
    Growth,
    Operation,
    Question,
    Reading,
    Row,
    Siblings,
    Visit,
)
from arbor.engine.rehydration import Rehydration
from arbor.engine.residency import Residency
from arbor.engine.sampling import ArithmeticCode
from arbor.engine.sampling_graphs import SamplingGraphs
from arbor.engine.scheduler import Schedulers
from arbor.engine.step import Stepper
from arbor.engine.text import before
from arbor.engine.token_source import CheckedSource, ModelSampler, TokenSource
from arbor.errors import BudgetInfeasible
from arbor.events import KV, Detail, Listener, Opened
from arbor.forest import by_tree
from arbor.heads.attention import cell_attention
from arbor.heads.sets import HeadSets, HeadStatistics, check_layers
from arbor.heads.table import HeadTable
from arbor.memory import KVMemory
from arbor.memory.prompt_files import PromptFiles
from arbor.memory.stores import NO_ROOM, LowerRoom
from arbor.model.fetch_costs import FetchCosts
from arbor.model.known_tokens import check_known
from arbor.model.level_rule import LevelRule
from arbor.model.plan import Segment
from arbor.model.runner import ModelRunner
from arbor.retention.base import BlockScores, ValueScores
from arbor.retention.future_reads import FutureReads
from arbor.retention.policy import Policy
from arbor.retention.token_statistics import TokenStatistics
from arbor.tree import Node, ThoughtTree

T = TypeVar("T")
Args = ParamSpec("Args")
Ended = TypeVar("Ended", bound=Operation)
_ALWAYS = LevelRule()


class Companion(Protocol):
    """An engine of another model."""

    @property
    def busy(self) -> bool:
        """Whether operations are in progress."""
        ...

    def step(self) -> None:
        """Run one forward for all operations in progress."""
        ...

    def abandon(self, interruption: BaseException) -> None:
        """Let all trees go as they are."""
        ...


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of the engine that work on the trees of one pool."""

    state: ForestState
    rules: Rules
    residency: Residency
    forwards: ForwardPasses
    stepper: Stepper


def _abandoned_if_interrupted(
    method: Callable[Concatenate[Engine, Args], T],
) -> Callable[Concatenate[Engine, Args], T]:
    """A method that leaves the engine in order after any `Exception`, and without trees after
    anything else.

    Ctrl-C comes between any two instructions, those that undo a change included: nothing is known
    of what they were about to change.
    """

    @wraps(method)
    def called(engine: Engine, /, *args: Args.args, **kwargs: Args.kwargs) -> T:
        try:
            return method(engine, *args, **kwargs)
        except Exception:
            raise
        except BaseException as interruption:
            engine.abandon(interruption)
            raise

    return called


class Engine:
    """Runs the model over the trees of many searches, in one budget. Knows no search.

    A search asks for operations on its tree (`begin_grow`, `begin_ask`, `begin_extend`), and `step`
    works on all of them: one forward, in which rows of any tree take part. `grow`, `ask` and
    `extend` take steps until their own operation is done.

    Every operation is a transaction: plan what it needs, evict to fit, allocate, only then compute.
    It succeeds, or raises `BudgetInfeasible` with the smallest budget that would do and leaves the
    tree as it was. So it does where the machine runs out of memory (`OutOfMemory`), with
    a budget that leaves room for the forward. After another exception, as of a listener, no token
    claims KV that was not computed, and the engine can go on. After an interruption (Ctrl-C, or
    whatever else is no `Exception`) it holds no tree, and searches that are opened then find what
    they find in a new engine.

    Two modes. ``lossless``: every running path is complete and exact before anything is computed
    after it, so that the budget changes time and nothing else; what does not fit together runs one
    after another. ``lossy``: tokens of running paths may leave as well, as the policy says, and
    what is computed then is computed over the gaps.

    Args:
        tokenizer: a Hugging Face tokenizer, for questions and boundaries.
        policy: what evictable blocks keep, and which tokens.
        mode: see above.
        rehydrate: what comes back when a path runs again: ``selective``, the missing tokens;
            ``span``, every token of a block that misses one (ArborKV section 4); ``off`` (lossy
            only), nothing: eviction cannot be undone.
        share: which first tokens use the same slots. Equal ones (lossless only): ``exact``, those
            of prompts and of siblings; ``prompts``; ``off``, none. In lossy mode ``similar`` and
            ``audit``: those of a prompt and a similar earlier one, as `prompt_hook` says.
        prompt_hook: see `other_prompt`; with these two kinds of sharing, and without them None.
        scores: of blocks, for the policies that read them.
        source: where tokens come from; by default the model.
        levels: which shared spans are read once for all rows that share them.
        lower: room for KV that has left the device; by default none. With a staging buffer
            attention reads it there, and a path may be longer than the budget; lossless, nothing
            shared.
        prompts: KV of prompts of earlier runs, in lossless mode; by default none.
        costs: of copying it back and of computing it again; None: it is copied back.
        debug: poison freed slots and check all invariants after every change.

    Raises:
        ModelError: the policy lets KV heads keep tokens of their own, and a layer has a window.

    Attributes:
        companions: engines of other models that its searches wait for as well, such as a reward
            model's; each `step` is one of theirs too.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        policy: Policy,
        mode: Mode = "lossless",
        rehydrate: Rehydrate = "selective",
        share: Share = "exact",
        prompt_hook: PromptHook | None = None,
        scores: BlockScores | None = None,
        source: TokenSource | None = None,
        levels: LevelRule = _ALWAYS,
        lower: LowerRoom = NO_ROOM,
        prompts: PromptFiles | None = None,
        costs: FetchCosts | None = None,
        debug: bool = False,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.policy = policy
        self.mode = mode
        self.rehydrate = rehydrate
        self.share = share
        assert mode == "lossy" or share not in SIMILAR, "a similar prompt is another one"
        assert (prompt_hook is not None) == (share in SIMILAR), "the kind of sharing is the hook's"
        self._prompt_hook = prompt_hook
        self.scores = scores or ValueScores()
        assert mode == "lossy" or rehydrate != "off", "lossless needs what it evicted back"
        if policy.by_head:
            assert mode == "lossy" and not lower.staging, "checked by `check_granularity`"
            check_layers(runner, policy)
        self.levels = levels
        self.lower = lower
        assert mode == "lossless" or prompts is None, "only exact KV is kept"
        self.prompts = prompts
        self.costs = costs
        self._debug = debug
        if source is None:
            graphs = None if runner.graphs is None else SamplingGraphs(runner.graphs.recorder)
            self._source: TokenSource = ModelSampler(tokenizer, self.scores.top, graphs)
        else:
            self._source = CheckedSource(source)
        self.companions: tuple[Companion, ...] = ()
        self._memory: KVMemory | None = None
        self._opened: _Parts | None = None
        # from alpha and the queries of `Tokens.lately`: the statistics of the trees opened next
        self.make_statistics: Callable[[float | None, int], TokenStatistics] = TokenStatistics
        self._latest: OpenTree | None = None

    # Life of a tree

    @_abandoned_if_interrupted
    def open(
        self,
        tree: ThoughtTree,
        slots: int,
        *,
        pool: int | None = None,
        part: Fraction | None = None,
        least: int = 0,
        emit: Listener = ignore,
        detail: Detail = "events",
        outlook: Callable[[], Mapping[int, float]] = dict,
        scores: Callable[[], Mapping[int, float]] = dict,
        interrupted: Callable[[], bool] = bool,
        reads: FutureReads | None = None,
        most: int | None = None,
    ) -> None:
        """Begin a run on a tree, next to those in progress; the KV of finished trees is freed.

        Args:
            tree: holds only its root.
            slots: the budget of this search alone, in tokens of KV; with `part`, what it may come
                to.
            pool: the budget of all searches; by default that of this one. What the first search
                sets holds until all have ended.
            part: the budget instead as a part of what full retention of the search, or of all
                searches that share a budget, holds up to then; 1: no limit. What the first of
                those that share one sets holds likewise.
            least: with `part`, tokens that a search is left in any case where its paths need not
                stay whole; where they do, one expansion is.
            emit: listener for everything that happens to the tree, until `finish`.
            detail: how finely decoding is reported to it.
            outlook: probability that a later operation reads the path to a block, by node id.
            scores: by which figures the search chooses, by node id; of the others by their values.
            interrupted: asked after every decode step whether to give up the blocks in progress.
            reads: future reads of a recorded run of the same search, for the clairvoyant policy.
            most: tokens that full retention of the search holds at most, the longest planned
                question included. Where there is room for those of all searches, nothing leaves to
                make room: questions wait for one another instead. None: unknown.

        Raises:
            OutOfMemory: the machine has less memory than that.
        """
        if self._opened is not None and tree in self._opened.state.trees:
            self.close(tree)
        self.close_finished()
        if self._opened is None or not self._opened.state.trees:
            self._opened = self._parts_for(slots if pool is None else pool, part)
        memory = self._opened.state.memory
        memory.adopt(tree)
        run = RunHooks(emit, detail, outlook, scores, interrupted)
        state = self._opened.state
        self._latest = OpenTree(
            tree, memory, slots, run, reads, most, least=least, shares=state.shares_siblings
        )
        self._opened.state.open(self._latest, part)

    def _parts_for(self, slots: int, part: Fraction | None) -> _Parts:
        # what is as large as the pool, or lies at its end, does not grow with it
        grows = part is not None and not (self.lower.staging or self.policy.by_head)
        memory, pool = self._memory, None
        fits = memory is not None and memory.grows == grows and (grows or memory.budget == slots)
        if not fits or self._opened is None:
            if memory is not None:
                memory.lower.close()
                # two at once may be too much, and what an interruption has left may hold the former
                pool = memory.pool if fits else None
            self._memory = self._opened = self._latest = memory = None
            self._memory = KVMemory(
                self.runner.layer_kv,
                None if grows else slots,
                self.runner.kv_dtype,
                self.runner.device,
                weight_bytes=self.runner.weight_bytes,
                lower=self.lower,
                heads=self._head_table(slots),
                debug=self._debug,
                pool=pool,
            )
            if self._memory.heads is not None:
                self._memory.pool.cell_attention = cell_attention
        assert self._memory is not None, "made above"
        lossless = self.mode == "lossless"
        streamed = bool(self.lower.staging)
        assert lossless or self.rehydrate == "off" or not streamed, "what is read comes back never"
        assert self.lower.inexact == (streamed and not lossless), "lossy mode stores inexact KV"
        assert self.share == "off" or not self.lower.staging, "such KV is shared by no two blocks"
        state = ForestState(
            self._memory,
            self.policy.protect,
            shares_prompts=lossless and self.share != "off",
            shares_siblings=lossless and self.share == "exact",
            keeps_prompts=self.share in SIMILAR if self.mode == "lossy" else self.share != "off",
            own_budgets=have_own_budgets(self.mode, self.share, staged=streamed),
            part=part,
        )
        lately = self.policy.observation.lately
        state.statistics = self.make_statistics(self.policy.protect.threshold, lately)
        kinds: tuple[type[Rules], type[Rules]] = (Rules, Lossy)
        if streamed:
            kinds = (Streamed, StreamedLossy)
        rules = kinds[not lossless](state, self.policy, self.rehydrate)
        observation = self.policy.observation
        statistics, heads = None, None
        if self.policy.by_head and self.policy.observes:
            statistics = HeadStatistics(self._memory, state.statistics)
        observer = None
        if observation.anything:
            observer = Observer(state, self.runner, observation, statistics)
        view = KVView(state, self.runner, observation, observer)
        if self.policy.by_head:
            heads = HeadSets(self._memory, self.policy, statistics, view.head_kv)
        residency = Residency(
            state,
            self.policy,
            self.scores,
            rules.paths_lose,
            token_kv=view.token_kv,
            heads=heads,
        )
        forwards = ForwardPasses(state, self.runner, observer=observer, levels=self.levels)
        schedulers = Schedulers(rules.scheduler, own_budgets=state.own_budgets)

        def run_piece(root: Node, segment: Segment) -> Tensor:
            return forwards.run([Part(root.tree, "prefill", [segment])])

        rehydration = Rehydration(
            state, residency, rules, self.runner.layer_count, self.costs, run_piece, self.prompts
        )
        decoding = Decoding(state, forwards, self._source, schedulers)
        stepper = Stepper(state, rules, residency, forwards, rehydration, decoding, schedulers)
        return _Parts(state, rules, residency, forwards, stepper)

    def _head_table(self, slots: int) -> HeadTable | None:
        """What KV heads hold, where each keeps tokens of its own."""
        if not self.policy.by_head:
            return None
        return HeadTable([each.num_kv_heads for each in self.runner.layer_kv], slots)

    @_abandoned_if_interrupted
    def finish(self, tree: ThoughtTree | None = None) -> None:
        """End of a run: nothing is emitted to it any more, and its operations are given up.

        Alone in the engine, the tree and its KV stay usable until the next `open`; next to other
        searches its KV is freed at once.

        Args:
            tree: of the run; by default the one opened last.
        """
        if self._opened is None or self._latest is None:
            return
        opened = self._opened.state.trees.get(self._latest.tree if tree is None else tree)
        if opened is None:
            return
        stepper = self._opened.stepper
        stepper.cancel(stepper.operations_of(opened), InterruptedError("the run has ended"))
        opened.finish()
        if len(self._opened.state.trees) > 1:
            self.close(opened.tree)

    @_abandoned_if_interrupted
    def close(self, tree: ThoughtTree) -> None:
        """Let a tree go: its operations are given up and its KV is freed; it stays readable.

        Nothing happens where it is gone: closed, or abandoned.
        """
        opened = self._find(tree)
        if opened is None:
            return
        parts = self._parts
        stepper = parts.stepper
        stepper.cancel(stepper.operations_of(opened), InterruptedError("the tree was closed"))
        stepper.drop_ahead()
        rows = self.state.close(opened)
        self.residency.forget(tree, rows)
        if parts.forwards.observer is not None:
            parts.forwards.observer.forget(tree)
        parts.stepper.drop(tree)

    def abandon(self, interruption: BaseException) -> None:
        """Let all trees go as they are, those of the companions as well: after an interruption,
        which may have cut off any change of them. It ends their operations, and the next `open`
        takes back what they hold."""
        parts, self._opened, self._latest = self._opened, None, None
        if parts is not None:
            parts.stepper.abandon(interruption)
        for companion in self.companions:
            companion.abandon(interruption)

    def _find(self, tree: ThoughtTree) -> OpenTree | None:
        """What is known of a tree; None where it is not open."""
        return None if self._opened is None else self._opened.state.trees.get(tree)

    @_abandoned_if_interrupted
    def close_finished(self) -> None:
        """Let the trees of all finished runs go; their prompts stay while nothing needs the
        slots."""
        if self._opened is not None:
            for opened in list(self._opened.state.trees.values()):
                if opened.finished:
                    self.close(opened.tree)

    def give_back(self) -> None:
        """Free what lower tiers hold; no run is in progress, and none follows."""
        if self._memory is not None:
            self._memory.lower.close()

    @_abandoned_if_interrupted
    def other_prompt(self, tree: ThoughtTree, emit: Listener) -> OtherPrompt | None:
        """What a search reads in place of its prompt, as a hook says; None: the prompt itself.

        The caller plants those tokens instead, and marks what it reads then as `inexact`.

        Args:
            tree: open, with nothing computed; next to other trees it reads its own prompt.
            emit: called with what the hook reports.
        """
        if self._prompt_hook is None or len(self.state.trees) > 1:
            return None
        return self._prompt_hook.other(self.memory, tree, emit)

    @_abandoned_if_interrupted
    def inexact(self, node: Node, begin: int) -> None:
        """Mark tokens of a block as those of another text, from `begin` on: nothing after them is
        exact."""
        self.memory.invalidate(node, begin)

    @property
    def state(self) -> ForestState:
        """The state of the open trees."""
        return self._parts.state

    @property
    def _parts(self) -> _Parts:
        assert self._opened is not None, "no tree is open"
        return self._opened

    @property
    def memory(self) -> KVMemory:
        return self.state.memory

    @property
    def room_tokens(self) -> int:
        """Slots that the pool has by now; 0 before the first tree."""
        return 0 if self._memory is None else self._memory.budget

    @property
    def held_tokens(self) -> int:
        """Slots in use, kept prompts included; 0 before the first tree."""
        return 0 if self._opened is None else self.memory.used

    @property
    def opened(self) -> OpenTree:
        """The tree opened last."""
        assert self._latest is not None, "no tree is open"
        return self._latest

    @property
    def tree(self) -> ThoughtTree:
        """The tree opened last."""
        return self.opened.tree

    @property
    def residency(self) -> Residency:
        return self._parts.residency

    @property
    def query_window(self) -> QueryWindow | None:
        """The last queries of the running paths of the tree opened last; None: the policy wants
        none, or no tree was opened."""
        if self._opened is None or self._latest is None:
            return None
        observer = self._opened.forwards.observer
        return None if observer is None else observer.window_of(self._latest.tree)

    @property
    def kv(self) -> KV:
        """Slots per tier now, of the tree opened last."""
        return self.opened.kv

    @_abandoned_if_interrupted
    def changed(self, nodes: Sequence[Node]) -> None:
        """The search has valued these blocks."""
        self.state.changed(nodes)

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation (no special tokens)."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # Operations

    @property
    def busy(self) -> bool:
        """Whether operations are in progress."""
        return self._opened is not None and self._opened.stepper.busy

    @_abandoned_if_interrupted
    def step(self) -> None:
        """Run one forward for all operations in progress, and one of each companion.

        What goes wrong ends the operations it concerns, and is raised by their `result`.
        """
        self._parts.stepper.step()
        for companion in self.companions:
            if companion.busy:
                companion.step()

    def extend(self, node: Node) -> None:
        """Make the path of `node` complete: the prefill of a prompt, or the rehydration of a
        path."""
        self._complete(self.begin_extend(node)).result()

    @_abandoned_if_interrupted
    def begin_extend(self, node: Node) -> Extending:
        """`extend`, as an operation for `step`."""
        self._require([node], [0])
        operation = Extending(self.state.of(node))
        operation.waiting.append(Visit(operation, 0, node))
        self._begin(operation)
        return operation

    def room(
        self, leaf_tokens: int, tree: ThoughtTree | None = None, longest: int | None = None
    ) -> int:
        """Blocks that may decode at once within the own budget of a tree, at least 1.

        Args:
            leaf_tokens: tokens of each at most.
            tree: by default the one opened last.
            longest: tokens of its longest path; by default of those run through the model.
        """
        opened = self.opened if tree is None else self.state.trees[tree]
        return self._parts.rules.room(
            opened, leaf_tokens, opened.longest if longest is None else longest
        )

    def grow(self, leaves: Sequence[tuple[Node, int]], growth: Growth) -> list[Node]:
        """Decode new children, all of them together as far as the budget allows, each up to its own
        boundary.

        Args:
            leaves: (leaf, width) pairs of one tree.
            growth: how.

        Returns:
            The new closed blocks, in the order asked. After an interruption the unfinished ones are
            PRUNED.

        Raises:
            BudgetInfeasible: a single child does not fit after its path.
        """
        return self._complete(self.begin_grow(leaves, growth)).result() if leaves else []

    @_abandoned_if_interrupted
    def begin_grow(
        self, leaves: Sequence[tuple[Node, int]], growth: Growth, *, counts: bool = True
    ) -> Growing:
        """`grow`, as an operation for `step`; at least one leaf.

        Args:
            leaves, growth: as for `grow`.
            counts: False: with the operation before it, one in the count that `FutureReads` uses.
        """
        parents = [leaf for leaf, _ in leaves]
        self._require(parents, self._longest(parents, growth))
        children = self._fork([leaf for leaf, width in leaves for _ in range(width)])
        return self.begin_decode(children, growth, counts=counts)

    @_abandoned_if_interrupted
    def begin_given(self, blocks: Sequence[GivenBlock], *, counts: bool = True) -> Growing:
        """Grow new children whose first tokens are given rather than sampled, as an operation for
        `step`.

        The given tokens of all of them are computed together as far as the budget allows, like
        those of a path.

        Args:
            blocks: of one tree, at least one.
            counts: as for `begin_grow`.

        Raises:
            BudgetInfeasible: a single child does not fit after its path.
            InputError: the model's weights lack a token.
        """
        for each in blocks:
            self._check_known(each.tokens, "a given block")
        self._require([each.leaf for each in blocks], [each.least for each in blocks])
        begins = [None if each.of is None else (each.of.id, len(each.tokens)) for each in blocks]
        children = self._fork([each.leaf for each in blocks], begins)
        for child, each in zip(children, blocks, strict=True):
            for token in each.tokens:
                child.tree.append(child, token)
            child.given = len(each.tokens)
            known = [0.0] * child.given if each.of is None else each.of.logprobs[: child.given]
            child.logprobs, child.logprob = known, sum(known)
        whole = [child for child, each in zip(children, blocks, strict=True) if each.whole]
        return self._begin_rows(children, [each.growth for each in blocks], whole, counts)

    def _fork(
        self, leaves: Sequence[Node], begins: Sequence[tuple[int, int] | None] = ()
    ) -> list[Node]:
        """A new open child of each of these blocks of one tree, reported, with what `Opened.begin`
        says of each."""
        children = [leaf.tree.fork(leaf) for leaf in leaves]
        self.state.changed(children)
        opened = self.state.of(leaves[0])
        for child, begin in zip_longest(children, begins):
            parent = None if child.parent is None else child.parent.id
            opened.emit(Opened(child.id, parent, child.index, child.depth, 0, "", begin))
        opened.raise_failure()
        return children

    def decode(self, children: Sequence[Node], growth: Growth) -> None:
        """Decode open blocks up to their boundaries, together as far as the budget allows.

        Args:
            children: open blocks of one tree without KV, empty or with a first token that is given
                rather than sampled.
            growth: how.

        Raises:
            BudgetInfeasible: a single child does not fit after its path; or the policy gives up
                less than it takes.
            OutOfMemory: a forward does not fit next to weights and KV.
            UsageError: an answer of the policy or the token source breaks its protocol.
                After any of these all of the children are PRUNED and hold nothing, those that were
                finished included.
        """
        if children:
            self._complete(self.begin_decode(children, growth)).result()

    @_abandoned_if_interrupted
    def begin_decode(
        self, children: Sequence[Node], growth: Growth, *, counts: bool = True
    ) -> Growing:
        """`decode`, as an operation for `step`; at least one block. `counts` as in `begin_grow`."""
        parents = [child.parent for child in children if child.parent is not None]
        self._require(parents, self._longest(parents, growth))
        return self._begin_rows(children, [growth] * len(children), (), counts)

    def _begin_rows(
        self,
        children: Sequence[Node],
        growths: Sequence[Growth],
        whole: Sequence[Node],
        counts: bool,
    ) -> Growing:
        """Decode open blocks that fit, see `begin_decode` and `begin_given`."""
        growth_of = dict(zip((child.id for child in children), growths, strict=True))
        ending = {child.id for child in whole}
        operation = Growing(self.state.of(children[0]), children)
        operation.opened.retained.begin(children)
        order = self._in_order(children, [child.parent or child for child in children])
        for place, child in enumerate(order):
            assert child.parent is not None, "the root does not decode"
            growth = growth_of[child.id]
            code = ArithmeticCode(growth.seed, child, growth.sampling)
            row = Row(operation, place, growth, child, child.parent, code)
            if child.id in ending:
                row.stop = (
                    growth.stop.after(child.tokens, before(child), row.leaf.reasoned) or "step"
                )
            if child.tokens:  # the last one is run like one that was sampled
                row.pending = child.tokens[-1]
                child.tree.take_back(child)
            operation.waiting.append(row)
        self._compare(operation)
        self.state.changed(children)
        if counts:
            operation.opened.begin_operation()
        self._begin(operation)
        return operation

    def _compare(self, operation: Growing) -> None:
        """Compare sampled blocks of one leaf while they decode, where their growth has a hook."""
        of_leaf: dict[tuple[Node, BranchHook], list[Row]] = {}
        for row in operation.waiting:
            assert isinstance(row, Row)
            hook = row.growth.branch_hook
            if hook is not None and row.pending is None:
                assert self.mode == "lossless", "what is compared would depend on the budget"
                of_leaf.setdefault((row.leaf, hook), []).append(row)
        for (_, hook), rows in of_leaf.items():
            if len(rows) > 1:
                siblings = Siblings(tuple(rows), hook.watch(rows))
                for row in rows:
                    row.siblings = siblings

    def ask(
        self,
        nodes: Sequence[Node],
        questions: Sequence[Sequence[int]],
        ways: Sequence[Way] = (),
    ) -> Tensor:
        """The model's next-token logits after `path + question`, for each pair; leaves the tree as
        it was.

        Args:
            nodes: blocks of one tree.
            questions: token ids, at least one each.
            ways: of each question through the layers, where they may leave early.

        Returns:
            [len(nodes), V] float32.

        Raises:
            BudgetInfeasible: one question does not fit after its path.
            InputError: the model's weights lack a token of one.
        """
        if not nodes:
            return NO_LOGITS
        return self._complete(self.begin_ask(nodes, questions, ways)).result()

    @_abandoned_if_interrupted
    def begin_ask(
        self,
        nodes: Sequence[Node],
        questions: Sequence[Sequence[int]],
        ways: Sequence[Way] = (),
        *,
        counts: bool = True,
        ahead_of: Operation | None = None,
    ) -> Asking:
        """`ask`, as an operation for `step`; at least one question. `counts` as in `begin_grow`;
        `ways`: of each question through the layers, where they may leave early; `ahead_of`: in
        progress, whose waiting work lets the questions go first."""
        for each in questions:
            self._check_known(each, "a question to the model")
        self._require(nodes, [len(question) for question in questions])
        operation = Asking(self.state.of(nodes[0]), len(nodes), ahead_of)
        for place in self._in_order(range(len(nodes)), nodes):
            way = ways[place] if ways else None
            question = Question(operation, place, nodes[place], questions[place], way=way)
            operation.waiting.append(question)
        if counts:
            operation.opened.begin_operation()
        self._begin(operation)
        return operation

    @_abandoned_if_interrupted
    def count_operation(self, tree: ThoughtTree) -> None:
        """Count an operation of which nothing is left to do, see `begin_grow`."""
        self.state.trees[tree].begin_operation()

    @_abandoned_if_interrupted
    def begin_read(self, nodes: Sequence[Node]) -> Reading:
        """Make the paths of blocks complete and read the model's next-token logits after them, as
        an operation for `step`; together as far as the budget allows.

        Args:
            nodes: closed blocks of one tree, at least one.

        Raises:
            BudgetInfeasible: one path does not fit.
        """
        self._require(nodes, [0] * len(nodes))
        operation = Reading(self.state.of(nodes[0]), len(nodes))
        for place in self._in_order(range(len(nodes)), nodes):
            operation.waiting.append(Visit(operation, place, nodes[place]))
        operation.opened.begin_operation()
        self._begin(operation)
        return operation

    def _begin(self, operation: Operation) -> None:
        self._parts.stepper.begin(operation)

    @_abandoned_if_interrupted
    def _complete(self, operation: Ended) -> Ended:
        """Take steps until an operation is done."""
        try:
            while not operation.done:
                self.step()
        except Exception as error:
            self._parts.stepper.cancel([operation], error)
            raise
        return operation

    @_abandoned_if_interrupted
    def give_up(self, tree: ThoughtTree, error: BaseException) -> None:
        """End all operations of a tree with an error, see `decode` for what that leaves; one that
        was abandoned has none."""
        opened = self._find(tree)
        if opened is not None:
            stepper = self._parts.stepper
            stepper.cancel(stepper.operations_of(opened), error)

    @_abandoned_if_interrupted
    def search_beams(self, settings: BeamSettings, ends: tuple[int, ...]) -> list[Hypothesis]:
        """Token-level beam search after the prompt of the tree opened last; the tree stays as it
        is.

        Args:
            ends: token ids that end the text.

        Returns:
            the best `settings.beams` hypotheses, best first; those so far after an interruption.

        Raises:
            BudgetInfeasible: the hypotheses hold more tokens than the budget; names what would do
                in any case.
        """
        opened, parts = self.opened, self._parts
        self.extend(opened.tree.root)
        search = BeamSearch(parts.state, parts.forwards, opened.tree, settings, ends)
        return search.run(parts.state.logits[opened.tree.root.row], opened.run.interrupted)

    @_abandoned_if_interrupted
    def forget(self, nodes: Sequence[Node]) -> None:
        """Free the KV of blocks that the search has given up."""
        self._parts.stepper.forget(nodes)
        for tree in by_tree(nodes):
            self.state.trees[tree].raise_failure()

    @contextmanager
    def hiding(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Within, nothing attends to these blocks: what the search would do had it lost them
        (ArborKV's leave-one-out).

        They are masked, not zeroed: a zero key still draws attention. Blocks computed before keep
        the KV they have, and where it was evicted they get the same again. What is grown within is
        not exact, and computed anew if it is read afterwards.
        """
        with self.state.hiding(nodes):
            yield

    # Planning

    def _longest(self, parents: Sequence[Node], growth: Growth) -> list[int]:
        """Slots that a new child of each block needs."""
        stop, decoded = growth.stop, self._parts.rules.decoded
        return [decoded(stop.longest(parent.reasoned)) for parent in parents]

    def _check_known(self, tokens: Sequence[int], what: str) -> None:
        """Raise `InputError` for tokens that would fail in a forward, and with it all others."""
        check_known(tokens, self.runner.vocabulary, what, self.tokenizer)

    def _require(self, nodes: Sequence[Node], extra: Sequence[int]) -> None:
        """Raise `BudgetInfeasible` unless what is required of each node's path fits with its extra
        tokens; a part of full retention is made to leave room for them."""
        rules = self._parts.rules
        ends = [rules.required(node) for node in nodes]
        needed = max((end + more for end, more in zip(ends, extra, strict=True)), default=0)
        if not nodes:
            return
        opened = self.state.of(nodes[0])
        account = opened.account
        if account.part is not None:  # it leaves room for any expansion where paths stay whole
            opened.retained.least = max(opened.retained.least, needed)
            return
        if needed > (slots := account.slots):
            what = f"{rules.must_fit} with its next block"
            raise BudgetInfeasible(needed, slots, what)

    def _in_order(self, work: Sequence[T], nodes: Sequence[Node]) -> list[T]:
        """Pieces of work in depth-first order of the tree, so that a wave shares what it can.

        Directions alternate, starting at the resident end: where a level does not fit, a fixed
        direction thrashes LRU.
        Results do not depend on the order.

        Args:
            nodes: the block at whose end each piece of work begins.
        """
        forest = self.state.forest
        names = [forest.order(node) if forest.cuts else node.key for node in nodes]
        order = sorted(range(len(work)), key=lambda i: (names[i], i))
        held = np.array([np.count_nonzero(nodes[i].span.resident) for i in order])
        place = np.arange(len(order))
        if (held * place).sum() > (held * place[::-1]).sum():
            order.reverse()
        return [work[i] for i in order]
