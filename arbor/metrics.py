"""The cost of a run: counters folded from its events."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from arbor.components import ONLY_IF_SET
from arbor.events import (
    KV,
    Allocated,
    Audited,
    Boundary,
    Compared,
    Discarded,
    Ended,
    Event,
    Evicted,
    Forwarded,
    Header,
    Limited,
    Merged,
    Opened,
    Pressure,
    Pruned,
    Rehydrated,
    Scored,
    Selected,
    Shared,
    Transition,
    Verified,
)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counters of one run. Tokens are slots of KV; bytes are KV only, weights excluded.

    Attributes:
        wall_s: seconds from the header to the end.
        prefill_s, decode_s, verify_s, rehydrate_s: seconds in forward passes of each kind, with
            sampling and without eviction.
        policy_s: seconds of retention policies, eviction included.
        tokens_prefilled: tokens of the prompt.
        tokens_shared: tokens whose KV another problem's prompt, or a sibling, had.
        tokens_loaded: tokens of the prompt whose KV a file of an earlier run had.
        tokens_merged: tokens of closed blocks whose slots siblings held too.
        tokens_substituted: tokens of the prompt replaced by those of a similar one.
        tokens_probed: tokens run through the first layers to compare prompts.
        probe_s: seconds of these comparisons.
        audits, audits_differ: searches repeated from the own prompt; those with another answer.
        tokens_generated: tokens of all closed blocks that were sampled.
        tokens_given: given tokens of closed blocks.
        branches_stopped: blocks that ended early since another branch was confident.
        tokens_recomputed: tokens whose KV was computed again after it had been dropped.
        tokens_stored: evicted tokens whose KV a lower tier took.
        tokens_fetched: tokens whose KV was copied back from a lower tier.
        tokens_discarded: tokens whose KV a lower tier gave up.
        streamed_bytes: KV that attention read in host memory.
        rows: rows run through the model, of every kind.
        steps: forward passes.
        read_tokens, unique_read_tokens: keys read if every row read its whole path by itself; when
            each shared span is read once.
        rounds, expansions: times the controller chose leaves; leaves grown.
        nodes: blocks opened, the root included.
        part: the part of full retention that the budget is; 0 where it is an amount.
        budget_tokens: slots of the budget; of a part, the most it came to.
        retained_tokens: the most that full retention held, where the budget is a part of it.
        expansion_tokens: the most that one expansion was, where it was more than the part.
        full_tokens: slots of full retention for the whole search shape, from the plan.
        smallest_tokens: the smallest workable budget.
        bytes_per_token: bytes of one token's KV in all layers.
        peak_tokens: most device slots at any instant, temporary ones and the buffer included.
        peak_unshared_tokens: peak of full retention where every leaf holds its whole path.
        mean_tokens: device slots held, averaged over forward passes.
        peak_host_tokens, peak_compressed_tokens, peak_disk_tokens: most slots the lower tiers held.
        evicted_tokens: tokens that left the device.
        evictions, rehydrations: times tokens left the device; times missing ones came back.
        transitions, transition_distance: times the running leaves changed; edges of all of them.
        pressure_events: times more slots were needed than were free.
        verified: candidates valued.
        asked: candidates the model judged.
        verifications, skipped_verifications: those that a gate decided about; that were skipped.
        left_early: candidates whose question left before the last layer.
        layers_skipped: layers that these questions did not run through, in all.
        audited_verifications, disagreements: verifications computed twice, to be compared; those
            that prefer another candidate.
        reward_s: seconds in forward passes of reward models.
        reward_path_tokens: tokens of the paths that reward models scored.
        reward_tokens, reward_recomputed: tokens that reward models computed; those of them whose KV
            had been evicted.
        reward_peak_tokens: most slots that a reward model held at any instant.
    """

    wall_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0
    rehydrate_s: float = 0.0
    policy_s: float = 0.0
    tokens_prefilled: int = 0
    tokens_shared: int = field(default=0, metadata=ONLY_IF_SET)
    tokens_loaded: int = field(default=0, metadata=ONLY_IF_SET)
    tokens_merged: int = field(default=0, metadata=ONLY_IF_SET)
    tokens_substituted: int = field(default=0, metadata=ONLY_IF_SET)
    tokens_probed: int = field(default=0, metadata=ONLY_IF_SET)
    probe_s: float = field(default=0.0, metadata=ONLY_IF_SET)
    audits: int = field(default=0, metadata=ONLY_IF_SET)
    audits_differ: int = field(default=0, metadata=ONLY_IF_SET)
    tokens_generated: int = 0
    tokens_given: int = field(default=0, metadata=ONLY_IF_SET)
    branches_stopped: int = field(
        default=0, metadata={**ONLY_IF_SET, "said": "branches stopped early"}
    )
    tokens_recomputed: int = 0
    tokens_stored: int = field(default=0, metadata=ONLY_IF_SET)
    tokens_fetched: int = 0
    tokens_discarded: int = field(default=0, metadata=ONLY_IF_SET)
    streamed_bytes: int = field(default=0, metadata=ONLY_IF_SET)
    rows: int = 0
    steps: int = 0
    read_tokens: int = 0
    unique_read_tokens: int = 0
    rounds: int = 0
    expansions: int = 0
    nodes: int = 0
    part: float = field(default=0.0, metadata=ONLY_IF_SET)
    budget_tokens: int = 0
    retained_tokens: int = field(default=0, metadata=ONLY_IF_SET)
    expansion_tokens: int = field(default=0, metadata=ONLY_IF_SET)
    full_tokens: int = 0
    smallest_tokens: int = 0
    bytes_per_token: int = 0
    peak_tokens: int = 0
    peak_unshared_tokens: int = 0
    mean_tokens: float = 0.0
    peak_host_tokens: int = 0
    peak_compressed_tokens: int = 0
    peak_disk_tokens: int = field(default=0, metadata=ONLY_IF_SET)
    evicted_tokens: int = 0
    evictions: int = 0
    rehydrations: int = 0
    transitions: int = 0
    transition_distance: int = 0
    pressure_events: int = 0
    verified: int = 0
    asked: int = 0
    verifications: int = field(default=0, metadata=ONLY_IF_SET)
    skipped_verifications: int = field(default=0, metadata=ONLY_IF_SET)
    left_early: int = field(default=0, metadata=ONLY_IF_SET)
    layers_skipped: int = field(default=0, metadata=ONLY_IF_SET)
    audited_verifications: int = field(default=0, metadata=ONLY_IF_SET)
    disagreements: int = field(default=0, metadata=ONLY_IF_SET)
    reward_s: float = field(default=0.0, metadata=ONLY_IF_SET)
    reward_path_tokens: int = field(default=0, metadata=ONLY_IF_SET)
    reward_tokens: int = field(default=0, metadata=ONLY_IF_SET)
    reward_recomputed: int = field(default=0, metadata=ONLY_IF_SET)
    reward_peak_tokens: int = field(default=0, metadata=ONLY_IF_SET)

    @property
    def blocks(self) -> int:
        """Thoughts in the tree: every node but the root."""
        return max(0, self.nodes - 1)

    @property
    def tree_tokens(self) -> int:
        """Unique tokens of the tree: the final KV of full retention."""
        return self.tokens_prefilled + self.tokens_generated + self.tokens_given

    @property
    def tok_per_s(self) -> float:
        """Tokens generated per second of wall time."""
        return self.tokens_generated / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def peak_bytes(self) -> int:
        """Bytes of KV at the peak."""
        return self.peak_tokens * self.bytes_per_token

    @property
    def peak_share(self) -> float:
        """The peak as a part of the tree's unique tokens; 1 is full retention."""
        return self.peak_tokens / self.tree_tokens if self.tree_tokens else 0.0

    @property
    def budget_share(self) -> float:
        """The peak as a part of the budget."""
        return self.peak_tokens / self.budget_tokens if self.budget_tokens else 0.0

    @property
    def remarks(self) -> list[str]:
        """Counters that a summary has where they are not 0: ``3 branches stopped early``."""
        said = [(getattr(self, each.name), each.metadata.get("said")) for each in fields(self)]
        return [f"{count:,} {words}" for count, words in said if words and count]

    @property
    def retained_share(self) -> float:
        """The peak as a part of what full retention held; 0 where that is not known."""
        return self.peak_tokens / self.retained_tokens if self.retained_tokens else 0.0

    @property
    def budget_reached(self) -> bool:
        """Whether the budget changed anything: room was needed, or the peak is the whole budget.

        KV of pruned blocks leaves at any budget, and does not count.
        """
        return self.pressure_events > 0 or self.peak_tokens >= self.budget_tokens

    @property
    def reward_reused(self) -> float:
        """Part of the tokens of scored paths whose KV was there; 0 without a reward model."""
        whole = self.reward_path_tokens
        return max(0.0, 1 - self.reward_tokens / whole) if whole else 0.0

    @property
    def reads_saved(self) -> float:
        """Part of the reads that sharing saved: 1 - unique / all."""
        return 1 - self.unique_read_tokens / self.read_tokens if self.read_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every counter and the derived numbers, JSON-able; some counters only if not 0."""
        derived = (
            "blocks",
            "tree_tokens",
            "tok_per_s",
            "peak_bytes",
            "peak_share",
            "budget_share",
            "reads_saved",
        )
        counters = dataclasses.asdict(self)
        for each in fields(self):
            if each.metadata.get("only_if_set") and not counters[each.name]:
                del counters[each.name]
        return counters | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The counters of `to_dict`; derived and unknown entries are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


class Unshared:
    """A listener that counts the KV of a search without prefix sharing.

    Attributes:
        rounds: tokens after each verification.
        peak: their maximum.
    """

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.peak = 0
        self._parent: dict[int, int] = {}
        self._end: dict[int, int] = {}  # tokens of the path up to each block's end
        self._leaves: set[int] = set()

    def __call__(self, event: Event) -> None:
        end = self._end
        match event:
            case Opened(node=node, parent=None, tokens=tokens):
                end[node] = tokens
            case Opened(node=node, parent=int(above)):
                self._parent[node] = above
                end[node] = end.get(above, 0)  # while it is open
                self._leaves -= {above}
                self._leaves.add(node)
            case Boundary(node=node, ids=ids):
                end[node] = end.get(self._parent.get(node, 0), 0) + len(ids)
            case Verified():
                self.rounds.append(sum(end.get(node, 0) for node in self._leaves))
                self.peak = max(self.peak, self.rounds[-1])
            case Pruned(nodes=nodes):
                self._leaves.difference_update(nodes)
            case _:
                pass


class MetricsFold:
    """A listener that folds events into `Metrics`; a trace folds to the metrics of its run.

    Args:
        clock: seconds; only differences count. A replay passes the trace's own times.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start: float | None = None
        self._wall_s: float | None = None
        self._held = 0  # device slots summed over forward passes
        self._unshared = Unshared()
        self._counts: dict[str, Any] = {}

    def metrics(self) -> Metrics:
        """The counters so far; `wall_s` is constant after the end."""
        wall_s = self._wall_s
        if wall_s is None:
            wall_s = 0.0 if self._start is None else self._clock() - self._start
        steps = self._counts.get("steps", 0)
        mean_tokens = self._held / steps if steps else 0.0
        return Metrics(
            **self._counts,
            wall_s=wall_s,
            mean_tokens=mean_tokens,
            peak_unshared_tokens=self._unshared.peak,
        )

    def __call__(self, event: Event) -> None:
        if self._start is None:
            self._start = self._clock()
        self._unshared(event)
        match event:
            case Header():
                for name in ("budget_tokens", "full_tokens", "smallest_tokens", "bytes_per_token"):
                    self._counts[name] = int(event.kv.get(name, 0))
                self._counts["part"] = float(event.kv.get("part", 0.0))
                if 0 < self._counts["part"] < 1:
                    self._counts["budget_tokens"] = 0  # until it is known
            case Opened():
                self._add(nodes=1)
                if event.parent is None:
                    self._add(tokens_prefilled=event.tokens)
            case Boundary():
                self._add(tokens_generated=len(event.ids) - event.given)
                if event.given:
                    self._add(tokens_given=event.given)
                if event.stop == "gate":
                    self._add(branches_stopped=1)
            case Selected():
                self._add(rounds=1, expansions=len(event.leaves))
            case Transition():
                self._add(transitions=1, transition_distance=event.distance)
            case Limited():
                self._most(budget_tokens=event.tokens, retained_tokens=event.retained)
                if event.expansion:
                    self._most(expansion_tokens=event.expansion)
            case Pressure():
                self._add(pressure_events=1)
            case Allocated():
                self._add(policy_s=event.elapsed_s)
            case Evicted():
                self._add(evictions=1, evicted_tokens=sum(count for _, count in event.nodes))
                if event.stored:
                    self._add(tokens_stored=sum(count for _, count in event.stored))
                self._hold(event.kv)
            case Discarded():
                gone = sum(count for _, count in event.nodes)
                self._add(tokens_discarded=gone - sum(count for _, count in event.taken))
                self._hold(event.kv)
            case Rehydrated():
                tokens = sum(count for _, count in event.nodes) + event.repeated - event.shared
                fetched = event.mode == "fetch"
                self._add(
                    rehydrations=1,
                    tokens_fetched=tokens if fetched else 0,
                    tokens_recomputed=0 if fetched else tokens,
                )
                if event.shared:
                    self._add(tokens_shared=event.shared)
                self._hold(event.kv)
            case Shared():
                tokens = sum(count for _, count in event.nodes)
                if event.source == "file":
                    self._add(tokens_loaded=tokens)
                else:
                    self._add(tokens_shared=tokens)
                self._hold(event.kv)
            case Merged():
                self._add(tokens_merged=sum(count for _, _, count in event.nodes))
                self._hold(event.kv)
            case Compared():
                replaced = event.tokens - event.common if event.shared else 0
                self._add(
                    tokens_substituted=replaced,
                    tokens_probed=event.rows,
                    probe_s=event.elapsed_s,
                )
            case Audited():
                self._add(audits=1, audits_differ=int(not event.same))
            case Forwarded():
                self._add(
                    rows=event.rows,
                    steps=event.steps,
                    read_tokens=event.read_tokens,
                    unique_read_tokens=event.unique_read_tokens,
                    **{f"{event.kind}_s": event.elapsed_s},
                )
                if event.streamed_bytes:
                    self._add(streamed_bytes=event.streamed_bytes)
                self._held += event.held or event.kv.device * event.steps
                self._hold(event.kv)
                self._most(peak_tokens=event.peak)
            case Scored():
                self._add(
                    reward_s=event.elapsed_s,
                    reward_path_tokens=event.path_tokens,
                    reward_tokens=event.computed,
                    reward_recomputed=event.recomputed,
                )
                self._most(reward_peak_tokens=event.peak)
            case Verified():
                self._add(verified=len(event.nodes), asked=event.asked)
                if event.confidences:
                    self._add(verifications=1, skipped_verifications=event.skipped)
                early = [at for at in event.exit_layer if 0 <= at < event.layers - 1]
                if early:
                    skipped = sum(event.layers - 1 - at for at in early)
                    self._add(left_early=len(early), layers_skipped=skipped)
                if event.audited:
                    self._add(audited_verifications=1, disagreements=not event.agrees)
            case Ended():
                elapsed = self._clock() - self._start
                self._wall_s = float(event.metrics.get("wall_s", elapsed))
            case _:
                pass

    def _add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._counts[name] = self._counts.get(name, 0) + amount

    def _most(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            self._counts[name] = max(self._counts.get(name, 0), amount)

    def _hold(self, kv: KV) -> None:
        self._most(
            peak_tokens=kv.device,
            peak_host_tokens=kv.host,
            peak_compressed_tokens=kv.compressed,
            peak_disk_tokens=kv.disk,
        )
