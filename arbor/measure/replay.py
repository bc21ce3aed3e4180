"""Replay: a recorded search again under another policy and budget, without running the model.

The tree, the values and the order of a lossless search do not depend on the budget, so the cost of
a policy (tokens recomputed, evictions, slots held) follows from a trace: the engine does all its
work, but forward passes compute nothing, and tokens and verdicts are those of the recording.
Attention is not recorded. Policies that read it (arborkv, kkt, h2o, tova) see zeros, so they keep
other tokens, and by MSVE's third signal other numbers of them, than the run did; their costs are
close, not equal. A run that was cut short is replayed up to the first expansion that it left
incomplete; one that proposed thoughts is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arbor import components
from arbor.engine.engine import Engine
from arbor.engine.mode import Rehydrate
from arbor.engine.mode_names import SIMILAR
from arbor.engine.operation import Growth, Row
from arbor.engine.stop_rule import StopReason, StopRule
from arbor.engine.token_source import ModelSampler
from arbor.errors import BudgetInfeasible, TraceError, UsageError
from arbor.events import Boundary, Ended, Event, Header, Opened, Sampled, Selected, Verified
from arbor.feature import hook
from arbor.kernels.attention.base import AttentionShape
from arbor.memory.pool import KVPool, LayerKV
from arbor.metrics import Metrics, MetricsFold
from arbor.model.attention import LayerSpec
from arbor.model.plan import ForwardPlan
from arbor.model.runner import ForwardResult
from arbor.model.sampling_params import Sampling
from arbor.retention.base import BlockScores, CalibratedScorer
from arbor.retention.future_reads import FutureReads
from arbor.retention.policy import Policy
from arbor.retention.token_kv import PairRotation
from arbor.run.limits import SessionLimits
from arbor.run.listeners import Broadcast
from arbor.run.questions import QuestionTurn, question_turn
from arbor.run.session import BY_ITSELF, Session
from arbor.run.settings import check_granularity, resolve_component
from arbor.tasks.base import Problem, Task
from arbor.trace.fold import Replay
from arbor.trace.read import Trace
from arbor.trace.records import NO_TOKEN
from arbor.tree import Node, NodeState
from arbor.verifiers.base import (
    Asker,
    Compares,
    Encoder,
    Inquires,
    Inquiry,
    Verdict,
    Verifier,
    parts_of,
)

# ends of blocks that are not reported to the search
GIVEN_UP: tuple[StopReason, ...] = ("limit", "gate")
MOST_VOCABULARY = 1 << 24  # the logits of a replay have a place for every token id


@dataclass(frozen=True)
class RecordedSearch:
    """The part of a trace that a replay needs.

    Attributes:
        header: of the run.
        prompt: tokens of the root (their ids are not recorded; only their number counts).
        blocks: by node id, as they closed.
        values: the verifier's, by node id, of the blocks that were valued.
        logprobs: of sampled tokens, by node id; empty unless the trace has them.
        reads: when each block is read.
        longest: tokens up to the end of a block, the most; no budget below that, but for the last
            token, lets the search run.
        expansions: complete ones of a run that was cut short; None: it ended by itself.
    """

    header: Header
    prompt: int
    blocks: Mapping[int, Boundary]
    values: Mapping[int, float]
    logprobs: Mapping[int, Sequence[float]]
    reads: FutureReads
    longest: int
    expansions: int | None = None

    @classmethod
    def of(cls, events: Sequence[Event]) -> RecordedSearch:
        """From the events of a run.

        Raises:
            TraceError: no header, no prompt, no tokens (``--trace-text none``), or inconsistent.
        """
        header = next((event for event in events if isinstance(event, Header)), None)
        opened = [event for event in events if isinstance(event, Opened)]
        root = next((event for event in opened if event.parent is None), None)
        verified = [event for event in events if isinstance(event, Verified) and event.nodes]
        values = {n: v for e in verified for n, v in zip(e.nodes, e.values, strict=False)}
        end = next((event for event in events if isinstance(event, Ended)), None)
        whole = end is not None and end.status in BY_ITSELF
        closed = [event for event in events if isinstance(event, Boundary)]
        inside = {event.node for event in opened if event.begin is not None}
        # questions have no value
        asked = {e.node for e in closed if 0 < e.given < len(e.ids)} - inside
        known = {e.node for e in closed} if whole else _reported(events) | asked
        known = {e.node for e in closed if e.node in known and e.stop not in GIVEN_UP}
        known |= values.keys()
        blocks = {e.node: e for e in closed if e.node in known}
        missing = "no header" if header is None else "no prompt" if root is None else ""
        if any(NO_TOKEN in block.ids for block in blocks.values()):
            missing = "no words (--trace-text none)"
        if header is None or root is None or missing:
            raise TraceError(
                "trace-replay",
                f"the trace has {missing}, which a replay of the search needs.",
                "Record it whole, with --trace-text full.",
            )
        state = Replay()
        for event in events:
            state(event)
        problems = [*state.problems, *_unplayable(opened, blocks)]
        if problems:
            raise TraceError(
                "trace-replay",
                f"the trace is inconsistent: {problems[0]}.",
                "'arbor trace check' lists every inconsistency.",
            )
        expansions: int | None = None
        if not whole:
            if asked:
                raise TraceError(
                    "trace-replay",
                    "a search that proposes thoughts is replayed whole, and this one was cut short.",
                    "Record it without a limit.",
                )
            cut = [e.node for e in opened if e.parent is not None and e.node not in blocks]
            expansions = _complete(events, min(cut, default=len(opened)))
        logprobs: dict[int, list[float]] = {}
        for event in events:
            if isinstance(event, Sampled):
                for node, logprob in zip(event.nodes, event.logprobs, strict=True):
                    logprobs.setdefault(node, []).append(logprob)
        ends = {root.node: root.tokens}
        for event in opened:
            if event.parent in ends and event.node in blocks:
                ends[event.node] = ends[event.parent] + len(blocks[event.node].ids)
        longest, reads = max(ends.values()), FutureReads.of(events)
        return cls(header, root.tokens, blocks, values, logprobs, reads, longest, expansions)

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that ended a sequence."""
        return frozenset(block.ids[-1] for block in self.blocks.values() if block.stop == "eos")


def _reported(events: Sequence[Event]) -> set[int]:
    """The blocks that closed before the search last chose leaves; later ones may not have been
    reported to it."""
    last = max((at for at, e in enumerate(events) if isinstance(e, Selected)), default=0)
    return {event.node for event in events[:last] if isinstance(event, Boundary)}


def _complete(events: Sequence[Event], first: int) -> int:
    """The expansions whose blocks all come before the block `first`."""
    widths = [width for e in events if isinstance(e, Selected) for _, width in e.leaves]
    last = itertools.accumulate(widths)  # ids are given in the order of expansions
    return sum(node < first for node in last)


def _unplayable(opened: Sequence[Opened], blocks: Mapping[int, Boundary]) -> Iterator[str]:
    """What no search of arbor records and a replay of it cannot do, one phrase each."""
    for due, event in enumerate(opened):
        if event.node != due:
            yield f"block {event.node:,} opens where block {due:,} is the next"
            break
    for block in blocks.values():
        if not block.ids:
            yield f"block {block.node:,} has no tokens"
        elif min(block.ids) < 0 or max(block.ids) >= MOST_VOCABULARY:
            yield f"block {block.node:,} has a token id outside 0 to {MOST_VOCABULARY - 1:,}"


def replay(
    recorded: RecordedSearch | Trace,
    tokenizer: Any,
    *,
    policy: str | Policy,
    slots: int,
    rehydrate: Rehydrate = "selective",
    scores: BlockScores | None = None,
    listen: Callable[[Event], None] = lambda event: None,
) -> Metrics:
    """Run a recorded search again within a budget of `slots`, in lossless mode.

    Args:
        recorded: the search; under full retention or not, its tree is the same.
        tokenizer: of its model, for the verifier's questions.
        policy: a name or a ready policy; ``belady`` reads the recording's future.
        slots: tokens of KV.
        rehydrate: ``selective`` or ``span``.
        scores: of blocks, for the policies that read them; by default those of the recorded run.
        listen: called with every event.

    Returns:
        The counters; times are those of the replay.

    Raises:
        BudgetInfeasible: a path does not fit.
        TraceError: the trace cannot be replayed.
    """
    record = (
        recorded if isinstance(recorded, RecordedSearch) else RecordedSearch.of(recorded.events)
    )
    config = record.header.config
    task: Task = components.build("task", config["task"])
    boundary = dataclasses.replace(
        task.boundary,
        max_tokens=config["step_tokens"],
        max_depth=config["max_depth"],
        path_tokens=config.get("path_tokens"),
    )
    share = config.get("share", "exact")
    if scores is None and (values := hook("msve")) is not None:
        scores = values.parse(config["msve"]) if config.get("msve") else values()
    largest = max((token for block in record.blocks.values() for token in block.ids), default=0)
    runner: Any = _NoModel(max(len(tokenizer), largest + 1))
    chosen: Policy = resolve_component("policy", policy, Policy)
    check_granularity(chosen, "lossless")
    if isinstance(chosen.scorer, CalibratedScorer):
        chosen = dataclasses.replace(chosen, scorer=chosen.scorer.without_file())
    engine = Engine(
        runner,
        tokenizer,
        policy=chosen,
        rehydrate=rehydrate,
        share="exact" if share in SIMILAR else share,
        scores=scores,
        source=_RecordedBlocks(record, tokenizer),
    )
    turn = question_turn(tokenizer, task, task.parse(record.header.problem))
    judge = _Judge(components.build("verifier", config["verifier"]), record, turn)
    most = [n for n in (config.get("max_expansions"), record.expansions) if n is not None]
    held = record.header.kv
    full = held.get("full_tokens")  # with the staged ones, what `Plan.most_held` was
    metrics = MetricsFold()
    emit = Broadcast((metrics, listen), lambda: session.stop("interrupted"))
    session = Session(
        engine,
        task,
        task.parse(record.header.problem),
        components.build("controller", config["controller"]),
        judge,
        Growth(record.header.seed, Sampling(), StopRule(tokenizer, boundary, record.eos)),
        SessionLimits(
            config["max_depth"], min(most, default=None), max_tokens=config.get("max_tokens")
        ),
        slots,
        emit,
        reads=record.reads,
        judged=lambda _search, _tree, children: [c for c in children if c.id in record.values],
        most=None if full is None else int(full) - int(held.get("staging_tokens", 0)),
    )
    emit(record.header)
    session.run([0] * record.prompt, record.header.problem)
    return metrics.metrics()


def replay_smallest(
    recorded: RecordedSearch | Trace, tokenizer: Any, *, slots: int, **settings: Any
) -> tuple[int, Metrics]:
    """`replay` in the smallest budget of at least `slots` in which the whole search runs.

    Returns:
        Slots, and the counters.
    """
    record = (
        recorded if isinstance(recorded, RecordedSearch) else RecordedSearch.of(recorded.events)
    )
    slots = max(slots, record.longest - 1)
    while True:
        try:
            return slots, replay(record, tokenizer, slots=slots, **settings)
        except BudgetInfeasible as error:
            assert error.needed > slots, f"{error.needed} slots are needed and {slots} are there"
            slots = error.needed


class _NoModel:
    """A runner whose forward passes compute nothing."""

    layer_kv = (LayerKV(1, 1, 1),)
    layer_count = 1
    dtype = kv_dtype = torch.float32
    device = torch.device("cpu")
    weight_bytes = 0
    is_asynchronous = False

    specs = (LayerSpec(AttentionShape(1, 1, 1, 1, scaling=1.0), False, True, 1),)

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._nothing = torch.zeros(1, vocabulary, dtype=torch.float32)

    def rotations(self, layers: Sequence[int]) -> dict[int, PairRotation]:
        """No number is turned; no query is recorded."""
        return dict.fromkeys(layers, PairRotation(False, torch.zeros(0, dtype=torch.float64)))

    def forward(
        self, plan: ForwardPlan, pool: KVPool, *, mass: Any = None, queries: Any = None
    ) -> ForwardResult:
        """Logits of zero, which are ignored; attention and queries are not recorded."""
        return ForwardResult(self._nothing.expand(len(plan.logit_rows), -1))


class _RecordedBlocks(ModelSampler):
    """The blocks of the recording."""

    def __init__(self, record: RecordedSearch, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._blocks = record.blocks
        self._logprobs = record.logprobs

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        return [self._of(row.node).ids[len(row.node.tokens)] for row in rows]

    def stop(self, node: Node, growth: Growth) -> StopReason | None:
        block = self._of(node)
        return block.stop if len(node.tokens) == len(block.ids) else None

    def confidence(self, nodes: Sequence[Node], logits: Tensor) -> list[float]:
        return [self._of(node).confidence for node in nodes]

    def finish(self, node: Node) -> None:
        if node.state is NodeState.PRUNED:  # cut short, unlike the recorded block
            return super().finish(node)
        block = self._of(node)
        node.text, node.logprob, node.top1 = block.text, block.logprob, block.top1
        sampled = self._logprobs.get(node.id)
        if sampled is None and node.given < len(node.tokens):
            node.logprobs = _NotRecorded()
        elif sampled is not None:
            node.logprobs[node.given :] = sampled[: len(node.tokens) - node.given]

    def _of(self, node: Node) -> Boundary:
        if node.id not in self._blocks:
            raise UsageError("trace-replay", "the search left the recorded one.")
        return self._blocks[node.id]


class _NotRecorded(list[float]):
    """Log probabilities of tokens that the trace does not have."""

    def __getitem__(self, at: Any) -> Any:
        raise TraceError(
            "trace-replay",
            "the search reads the log probability of each token, which the trace does not have.",
            "Record it with --set trace_level=tokens.",
        )


class _InTurns:
    """The engine as a verifier of the recorded search saw it."""

    def __init__(self, engine: Encoder, turn: QuestionTurn | None) -> None:
        self._engine = engine
        self._turn = turn

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text)

    def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        assert isinstance(self._engine, Asker)
        return self._engine.ask(nodes, questions)

    def turn(self, message: str, answer: str = "") -> list[int] | None:
        return None if self._turn is None else self._turn.encode(message, answer)


class _Judge:
    """The recorded verdicts; the verifier's parts ask their questions as they did."""

    needs_model = True

    def __init__(
        self, verifier: Verifier, record: RecordedSearch, turn: QuestionTurn | None
    ) -> None:
        self.parts = [_Part(part, record.values, turn) for part in parts_of(verifier)]

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        parts = self.parts
        return self.combined([part.verify(task, problem, candidates, engine) for part in parts])

    def combined(self, verdicts: Sequence[Verdict]) -> Verdict:
        """The recorded values; a gate decides as it did, by the candidates' confidences."""
        gate = next((each.gate for each in verdicts if each.gate), None)
        if gate is not None:
            gate = dataclasses.replace(gate, audited=())
        return Verdict(verdicts[0].values, sum(each.asked for each in verdicts), gate=gate)


class _Part:
    """One part of a verifier, with the recorded values for verdicts."""

    def __init__(
        self, verifier: Verifier, values: Mapping[int, float], turn: QuestionTurn | None
    ) -> None:
        self.verifier = verifier
        self.needs_model = verifier.needs_model
        self.compares = isinstance(verifier, Compares) and verifier.compares
        self._values = values
        self._turn = turn

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        if not self.needs_model:
            return self._recorded(candidates, Verdict((), 0))
        asker = _InTurns(engine, self._turn)
        return self._recorded(candidates, self.verifier.verify(task, problem, candidates, asker))

    def inquire(
        self, task: Task, problem: Problem, candidates: Sequence[Node], encoder: Encoder
    ) -> Inquiry | None:
        """The verifier's questions; those that may leave the model early are asked in full."""
        if not (self.needs_model and isinstance(self.verifier, Inquires)):
            return None
        asker = _InTurns(encoder, self._turn)
        found = self.verifier.inquire(task, problem, candidates, asker)
        if found is None or found.ways:
            return None
        return dataclasses.replace(
            found, verdict=lambda logits: self._recorded(candidates, found.verdict(logits))
        )

    def _recorded(self, candidates: Sequence[Node], verdict: Verdict) -> Verdict:
        values = tuple(self._values[node.id] for node in candidates)
        return dataclasses.replace(verdict, values=values, scores=())
