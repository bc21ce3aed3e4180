"""The model runner: the only caller of the model."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from arbor.errors import ModelError
from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
    ObservingBackend,
)
from arbor.kernels.attention.fixed import FixedBackend
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.fused.native_layers import MOST_ROWS
from arbor.kernels.int8 import read_slots
from arbor.kernels.invariant import row_invariant
from arbor.kernels.linear.layers import weight_bytes
from arbor.kernels.staging import Staging
from arbor.memory.pool import KVPool, LayerKV
from arbor.model.attention import (
    IMPLEMENTATION,
    Attend,
    AttentionCall,
    LayerSpec,
    answered_by,
    probe,
    register_implementation,
    text_config,
    written,
)
from arbor.model.fuse.layers import (
    FORMS,
    TRIAL_SLOTS,
    Form,
    WholeDecoder,
    trial_plans,
    whole_decoder,
)
from arbor.model.graphs import DecodeGraphs, Recorder
from arbor.model.layers import Leave, Tap, Unembedding, install, note_form
from arbor.model.parallel.shards import cannot
from arbor.model.plan import ForwardPlan, select_rows
from arbor.model.rotation import rotations_of
from arbor.model.streaming import StreamedAttention
from arbor.retention.token_kv import PairRotation

if TYPE_CHECKING:
    from arbor.heads.attention import CellAttention
    from arbor.model.parallel.followers import Followers
    from arbor.model.parallel.orders import ForwardOrder
    from arbor.model.parallel.ranks import Ranks

SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
OWN_ATTENTION = "no attention but the model's own can be used"
MOST_LAYERS = 10_000  # more would take minutes to describe


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The outputs of a forward.

    Attributes:
        logits: [n, V] float32, of the plan's `logit_rows`.
        hidden: layer -> [T, d], output of the chosen layers (before the final norm).
        exit_layer: int64 [T], the last layer each row went through; None when all ran to the end.
        mass: float32 [slots + 1], attention mass each slot received in the chosen layers, summed
            over rows, query heads and layers; by head float32 [n, slots + 1], of each KV head of
            each of these layers, in their order; None unless asked.
        queries: layer -> [m, H_q, D_k], position-encoded queries of the rows asked for.
    """

    logits: Tensor
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    exit_layer: Tensor | None = None
    mass: Tensor | None = None
    queries: Mapping[int, Tensor] = field(default_factory=dict)


@runtime_checkable
class StagedBackend(Protocol):
    """A backend that takes key lists already on the device."""

    def unplanned(
        self, layouts: Iterable[tuple[CascadeLayout, AttentionShape]]
    ) -> list[CascadeLevel]:
        """Levels whose key lists the next plans of these layouts need."""
        ...

    def place(self, levels: Sequence[CascadeLevel], lists: Sequence[Tensor]) -> None:
        """Their key lists on the device, until the next call."""
        ...


class ModelRunner:
    """An unmodified Hugging Face decoder whose attention reads our slots.

    Engines in several threads may share it: they run their forwards one after the other.

    Args:
        model: a `*ForCausalLM`; switched to our attention in place and put into eval mode.
        backend: runs the attention.
        recorder: captures decode steps; None, or a backend whose buffers move: no CUDA graphs.
        kv_dtype: of pools: int8 for 8-bit KV, which the backend then has to read; None: the
            model's.
        deterministic: element-wise functions and reductions do not depend on the batch; the
            attention and the linear layers bring that with them.
        ranks: the processes that hold the model together; None: this one holds all of it.

    Attributes:
        followers: the ranks that compute each forward with this one; None: this is none or not the
            first of several, or they still load.
        graphs: of decode steps; None without.
        vocabulary: number of tokens that the model has weights for.
        kv_dtype: of the pools of searches; `forward` itself takes the model's numbers as well.

    Raises:
        ModelError: a layer we cannot run exactly, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: AttentionBackend,
        recorder: Recorder | None = None,
        *,
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self.followers: Followers | None = None
        self.model = model.eval()
        self.backend = backend
        self.deterministic = deterministic
        give_own_config(model)
        self.config = text_config(model)
        check_layer_types(self.config)
        self.vocabulary = int(self.config.vocab_size)
        self.layer_count = int(self.config.num_hidden_layers)
        register_implementation()
        try:
            model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
        except (AttributeError, ImportError, KeyError, NotImplementedError, ValueError) as error:
            everywhere = range(self.layer_count)
            raise _in_layers(self.config, OWN_ATTENTION, everywhere) from error
        self._layers = install(model, self.layer_count)
        noted = note_form(self._layers)
        try:
            self.specs = check_specs(probe(model, self.layer_count), self.config)
        finally:
            noted.remove()
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.kv_dtype = kv_dtype or self.dtype
        self._shapes = tuple(dict.fromkeys(spec.shape for spec in self.specs))
        self._staging = None if self.device.type == "cpu" else Staging(self.device)
        # Triton and FlashInfer launch on the current device, wherever their tensors are
        self._launches: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.device.type == "cuda":
            self._launches = partial(torch.cuda.device, self.device)
        self._layers_context: Callable[[], AbstractContextManager[None]] = (
            partial(row_invariant, self.device) if deterministic else nullcontext
        )
        self._staged = backend if isinstance(backend, StagedBackend) else None
        self._unembedding: Unembedding | None = None
        self._rotations: dict[int, PairRotation | None] = {}
        self._whole: WholeDecoder | None = None
        # one forward at a time: hooks and buffers are the model's; a forward may call `unembed`
        self._turn = threading.RLock()
        self.graphs: DecodeGraphs | None = None
        if recorder is not None and isinstance(backend, FixedBackend):
            staging = Staging(self.device)  # a buffer of its own: both may be in use
            shapes = [spec.shape for spec in self.specs]
            self.graphs = DecodeGraphs(backend, shapes, recorder, staging, self._run, self.dtype)

    @property
    def is_asynchronous(self) -> bool:
        """Whether a forward returns before it is done."""
        return self.device.type == "cuda" and self.followers is None

    @property
    def weight_bytes(self) -> int:
        """What the model's weights take now, packed or not."""
        return weight_bytes(self.model)

    @property
    def layer_kv(self) -> tuple[LayerKV, ...]:
        """What each layer stores per token, as probed."""
        return tuple(
            LayerKV(s.shape.num_kv_heads, s.shape.head_dim_qk, s.shape.head_dim_vo)
            for s in self.specs
        )

    @torch.inference_mode()
    def forward(
        self,
        plan: ForwardPlan,
        pool: KVPool,
        *,
        stop_after: int | None = None,
        hidden: Sequence[int] = (),
        leave: Leave | None = None,
        mass: Mapping[int, Tensor | None] | None = None,
        by_head: bool = False,
        queries: Mapping[int, Tensor] | None = None,
    ) -> ForwardResult:
        """Run one ragged batch; every layer writes all new K/V before it attends.

        Args:
            plan: the batch.
            pool: holds the context, receives the new K/V.
            stop_after: last layer to run (0-based); norm and head follow it. None = all.
            hidden: layers whose outputs are returned.
            leave: asked after each layer but the last which rows leave; they write no K/V in later
                layers, and their logits come from the state they left with.
            mass: layer -> KV heads (int64) whose attention mass is summed; None as heads = all.
                Rows that run again give none.
            by_head: one sum for each KV head of each layer instead of one for all.
            queries: layer -> rows (int64 [m], increasing) whose queries are returned; no row of a
                layer that these leave before.
        """
        last = self.layer_count - 1 if stop_after is None else stop_after
        assert 0 <= last < self.layer_count, f"layer {last} of {self.layer_count}"
        observed = bool(mass or queries)
        plain = stop_after is None and not hidden and leave is None and not observed
        with self._turn, self._launches():
            cells: CellAttention | None = None  # where KV heads read each other's cells
            if pool.holders is not None:
                cells = pool.cell_attention(plan.layout(None), pool, self.backend)
            if self.graphs is not None and plain and pool.reader is None and cells is None:
                return ForwardResult(
                    self.graphs.run(plan, pool, lambda: self._forward(plan, pool, last).logits)
                )
            asked = _Asked(mass or {}, by_head, queries or {}) if observed else None
            if self.followers is None:
                return self._forward(plan, pool, last, hidden, leave, asked, cells)
            if leave is not None:
                raise cannot(
                    self.followers.ranks.count, "leaving between layers", "another verifier"
                )
            with self.followers.together(self._order(plan, pool, last, hidden, asked)):
                return self._together(plan, pool, last, hidden, asked)

    @torch.inference_mode()
    def unembed(
        self, state: Tensor, ids: Sequence[int] | None = None, *, norm: bool = True
    ) -> Tensor:
        """The logits that the model would give if its layers had ended with this state.

        Args:
            state: [n, d], output of any layer.
            ids: of these tokens only.
            norm: False: without the final norm, and what the model does to its logits.

        Returns:
            [n, V] or [n, len(ids)] float32.
        """
        if self.ranks is not None:
            raise cannot(self.ranks.count, "leaving between layers", "another verifier")
        with self._turn, self._launches(), self._layers_context():
            if self._unembedding is None:
                self._unembedding = Unembedding(self.model, self._layers)
            return self._unembedding(state, ids, norm=norm)

    # Together with other ranks

    def follow(self, order: ForwardOrder, pool: KVPool) -> None:
        """Compute this rank's part of a forward that the first rank runs."""
        asked = None
        if order.mass or order.queries:
            rows = {layer: torch.from_numpy(each) for layer, each in (order.queries or {}).items()}
            asked = _Asked(dict.fromkeys(order.mass), queries=rows)
        with self._turn, self._launches(), torch.inference_mode():
            self._together(order.plan, pool, order.last, order.hidden, asked)

    def _order(
        self,
        plan: ForwardPlan,
        pool: KVPool,
        last: int,
        hidden: Sequence[int],
        asked: _Asked | None,
    ) -> ForwardOrder:
        """What the other ranks have to know of a forward."""
        from arbor.model.parallel.orders import ForwardOrder, columns_of, layouts_of

        assert self.followers is not None, "it is asked for where there are some"
        windows = list(dict.fromkeys(spec.shape.window for spec in self.specs))
        asked = asked or _Asked()
        return ForwardOrder(
            self.followers.place(pool),
            columns_of(plan),
            layouts_of(plan, windows),
            last,
            tuple(hidden),
            tuple(asked.mass),
            {layer: rows.cpu().numpy() for layer, rows in asked.queries.items()},
        )

    def _together(
        self,
        plan: ForwardPlan,
        pool: KVPool,
        last: int,
        hidden: Sequence[int],
        asked: _Asked | None,
    ) -> ForwardResult:
        """A forward; what is observed is of all heads, and mass the mean over the ranks."""
        result = self._forward(plan, pool, last, hidden, asked=asked)
        ranks = self.ranks
        if ranks is None or not ranks.has_heads:
            return result
        mass = None if result.mass is None else ranks.mean(result.mass)
        queries = {layer: ranks.joined(each, dim=1) for layer, each in result.queries.items()}
        return replace(result, mass=mass, queries=queries)

    @torch.inference_mode()
    def read(self, pool: KVPool, layer: int, slots: Tensor, *, values: bool) -> Tensor:
        """Keys or values of a layer in slots, of the heads of all ranks: [n, H_kv, D].

        Args:
            slots: int64 [n].
            values: values, or else keys.
        """
        if self.followers is None:
            return self.read_together(pool, layer, slots, values=values)
        from arbor.model.parallel.orders import ReadOrder

        with self._turn:
            numbers = slots.cpu().numpy()
            order = ReadOrder(self.followers.place(pool), layer, values, numbers)
            with self.followers.together(order):
                return self.read_together(pool, layer, slots, values=values)

    @torch.inference_mode()
    def read_together(
        self, pool: KVPool, layer: int, slots: Tensor | NDArray[np.int64], *, values: bool
    ) -> Tensor:
        """`read` on each rank, all at once."""
        if not isinstance(slots, Tensor):
            slots = torch.from_numpy(slots)
        shape = self.specs[layer].shape
        part, dim = pool.k[layer], shape.head_dim_qk
        if values:
            part, dim = pool.v[layer], shape.head_dim_vo
        found = read_slots(part, slots.to(part.device), dim)
        if self.ranks is None or not self.ranks.has_heads:
            return found
        return self.ranks.joined(found, dim=1)

    def rotations(self, layers: Sequence[int]) -> dict[int, PairRotation | None]:
        """How layers encode positions, found once; None where that is not a known rotation."""
        with self._turn, self._launches():
            missing = [layer for layer in layers if layer not in self._rotations]
            if missing:
                with nullcontext() if self.ranks is None else self.ranks.alone():
                    self._rotations |= rotations_of(self.model, missing)
            return {layer: self._rotations[layer] for layer in layers}

    @property
    def layers_form(self) -> Form | None:
        """The form in which all layers run as one call (`WholeDecoder`); None: one by one."""
        return None if self._whole is None else self._whole.form

    @torch.inference_mode()
    def fuse_layers(self, known: str | None = None) -> str:
        """From now on, run all layers of small batches as one native call, if the bits stay.

        A random batch and the step after it, on pools of their own, must give the logits, keys and
        values of the layers one by one. Weights packed and modules fused before.

        Args:
            known: the form that gave the same bits before (`layers_form`), which is taken untried;
                None, or no form: each is tried.

        Returns:
            "", or why the layers run one by one.
        """
        self._whole = None
        if self.ranks is not None:
            return "other processes have a part of each"
        if not isinstance(self.backend, NativeCascade) or self.device.type != "cpu":
            return "its attention does not run by the native kernels"
        own: list[Tensor] = []
        reason = ""
        untried = [form for form in FORMS if form == known]
        for form in untried or FORMS:
            found = whole_decoder(self.model, self._layers, form)
            if isinstance(found, str):
                reason = found
                continue
            own = own or ([] if untried else self._trial(None))
            try:
                same = bool(untried) or all(map(torch.equal, own, self._trial(found)))
            except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
                reason = f"its layers are given something else: {type(error).__name__}"
                continue
            if same:
                self._whole = found
                return ""
            reason = "its results differ"
        return reason

    def _trial(self, whole: WholeDecoder | None) -> list[Tensor]:
        """Logits, keys and values of two forwards over random ids, the layers one by one or not."""
        pool = KVPool(self.layer_kv, TRIAL_SLOTS, self.dtype, self.device)
        self._whole = whole
        try:
            plans = trial_plans(self.vocabulary)
            logits = [self.forward(plan, pool).logits for plan in plans]
        finally:
            self._whole = None
        return [*logits, *pool.k, *pool.v]

    def _forward(
        self,
        plan: ForwardPlan,
        pool: KVPool,
        last: int,
        hidden: Sequence[int] = (),
        leave: Leave | None = None,
        asked: _Asked | None = None,
        cells: CellAttention | None = None,
    ) -> ForwardResult:
        """`forward` without a graph."""
        ids, positions, write, logit_rows = self._send(plan)
        if plan.ids_there is not None:
            ids = plan.ids_there
        attend = _Attention(plan, pool, self.backend, write, asked or _Asked(), cells)
        if (
            self._whole is not None
            and last == self.layer_count - 1
            and not (hidden or leave or (asked and asked.queries))
            and plan.rows <= MOST_ROWS
            and pool.reader is None
            and cells is None
            and pool.dtype == self.dtype
            and not self._whole.hooked
        ):
            with self._whole.reading(attend):
                logits = self._logits(ids, positions, logit_rows, self._whole)
            return ForwardResult(logits.float(), mass=attend.mass if asked else None)
        tap = None
        if hidden or leave is not None:
            tap = Tap(self._layers, plan.rows, hidden, leave, last, attend.keep_rows)
        self._layers.stop_after = None if last == self.layer_count - 1 else last
        try:
            logits = self._run(ids, positions, logit_rows, attend)
        finally:
            self._layers.stop_after = None
            if tap is not None:
                tap.remove()
        assert attend.deepest >= 0, "the model's attention was changed after arbor took it over"
        assert attend.deepest <= last, f"layer {attend.deepest} ran, {last} was to be the last"
        return ForwardResult(
            logits=logits.float(),
            hidden=tap.hidden if tap is not None else {},
            exit_layer=tap.exit_layer if leave is not None and tap is not None else None,
            mass=attend.mass,
            queries=attend.queries,
        )

    def _send(self, plan: ForwardPlan) -> list[Tensor]:
        """Ids, positions, write and logit rows on the device, and key lists where they are taken
        there; all in one copy."""
        if self._staging is None:
            return [plan.ids, plan.positions, plan.write, plan.logit_rows]
        levels: list[CascadeLevel] = []
        staged = self._staged
        if staged is not None:
            levels = staged.unplanned((plan.layout(s.window), s) for s in self._shapes)
        numbers = (plan.ids, plan.positions, plan.write, plan.logit_rows)
        sent = self._staging.send([*numbers, *(level.kv_indices for level in levels)])
        if staged is not None:
            staged.place(levels, sent[len(numbers) :])
        return sent[: len(numbers)]

    def _run(self, ids: Tensor, positions: Tensor, logit_rows: Tensor, attend: Attend) -> Tensor:
        """The model over rows on its device: logits of the logit rows, [n, V] in its dtype."""
        with answered_by(attend):
            return self._logits(ids, positions, logit_rows)

    def _logits(
        self,
        ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        whole: WholeDecoder | None = None,
    ) -> Tensor:
        with self._layers_context():
            if whole is not None and whole.direct is not None:
                return whole.direct(ids, positions, logit_rows, whole.state)
            output = self.model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        logits: Tensor = output.logits[0]
        if len(logits) == len(logit_rows):
            return logits
        if len(logits) == len(ids):  # its forward drops what rows are asked for
            return logits[logit_rows]
        raise ModelError(
            "arch-unsupported",
            f"model_type '{self.config.model_type}': its forward gives the logits of {len(logits)} "
            f"rows, and {len(logit_rows)} of {len(ids)} were asked for.",
            "Take another model.",
            model_type=self.config.model_type,
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is observed of a forward; see `ModelRunner.forward`."""

    mass: Mapping[int, Tensor | None] = field(default_factory=dict)
    by_head: bool = False
    queries: Mapping[int, Tensor] = field(default_factory=dict)


class _Attention:
    """Answers the attention calls of one forward: write, then attend."""

    def __init__(
        self,
        plan: ForwardPlan,
        pool: KVPool,
        backend: AttentionBackend,
        write: Tensor,
        asked: _Asked,
        cells: CellAttention | None = None,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self.pools: tuple[Sequence[Tensor], Sequence[Tensor]] = pool.k, pool.v
        self._backend = backend
        self.write = write
        self._alive: Tensor | None = None
        self._streamed = None
        if pool.reader is not None:
            self._streamed = StreamedAttention(plan.table, pool.reader, backend)
        self._plans: dict[AttentionShape, Any] = {}
        self._cells = cells
        self._mass_heads = asked.mass
        self.observed: Sequence[int] = sorted(asked.mass)
        self._by_head = asked.by_head
        self._query_rows = asked.queries
        self._again = plan.again if asked.mass and bool(plan.again.any()) else None
        self._received: list[Tensor] = []  # by head: of each layer so far
        self._sum: Tensor | None = None
        self.deepest = -1
        self.queries: dict[int, Tensor] = {}

    @property
    def mass(self) -> Tensor | None:
        """`ForwardResult.mass`."""
        if self._cells is not None:
            return self._cells.mass
        return torch.cat(self._received) if self._received else self._sum

    def _add(self, mass: Tensor) -> None:
        if self._by_head:
            self._received.append(mass)
        else:
            self._sum = mass if self._sum is None else self._sum + mass

    def keep_rows(self, alive: Tensor) -> None:
        """From the next layer on only these rows (int64 [T']) run."""
        self._alive = alive
        self.write = self._plan.write[alive].to(self.write.device)
        self._plans.clear()
        if self._cells is not None:
            self._cells.keep_rows(alive)
        if self._streamed is not None:
            self._streamed.keep_rows(alive)

    def __call__(self, call: AttentionCall) -> Tensor:
        pool, layer = self._pool, call.layer
        self.deepest = max(self.deepest, layer)
        q = written(call, pool, self.write)
        if (rows := self._query_rows.get(layer)) is not None:
            if self._alive is not None:
                rows = torch.searchsorted(self._alive, rows)
            self.queries[layer] = q[rows.to(q.device)]
        if self._streamed is not None:
            return self._answer(self._streamed, call, q)
        if self._cells is not None:
            again = self._repeated
            return self._cells.run(
                layer,
                call.shape,
                q,
                call.sinks,
                observe=layer in self._mass_heads,
                counted=None if again is None else ~again,
            )
        plan = self.plan(call.shape)
        k, v = pool.k[layer], pool.v[layer]
        if layer not in self._mass_heads:
            return self._backend.run(plan, q, k, v, call.sinks)[0]
        heads, again = self._mass_heads[layer], self._repeated
        # backends of other packages may know one sum only
        each = {"by_head": True} if self._by_head else {}
        if isinstance(self._backend, ObservingBackend):
            counted = None if again is None else ~again
            out, _, added = self._backend.run_observed(
                plan, q, k, v, call.sinks, counted, heads, **each
            )
        else:
            out, lse = self._backend.run(plan, q, k, v, call.sinks)
            added = self._backend.mass(plan, q, k, _counting(lse, again), heads, **each)
        self._add(added)
        return out

    def plan(self, shape: AttentionShape) -> Any:
        """The backend's plan for layers of this shape, made once."""
        plan = self._plans.get(shape)
        if plan is None:
            layout = self._plan.layout(shape.window)
            if self._alive is not None:
                layout = select_rows(layout, self._alive, shape.window)
            plan = self._plans[shape] = self._backend.plan(layout, shape)
        return plan

    @property
    def counted(self) -> Tensor | None:
        """See `ReadsPool`."""
        again = self._repeated
        return None if again is None else (~again).float()

    def received(self, shape: AttentionShape) -> Tensor:
        """See `ReadsPool`."""
        assert isinstance(self._backend, NativeCascade), "the layers run as one call of it"
        return self._backend.received(self.plan(shape))

    def observe(self, layer: int, shape: AttentionShape, received: Tensor) -> None:
        """See `ReadsPool`."""
        assert isinstance(self._backend, NativeCascade), "the layers run as one call of it"
        heads, slots = self._mass_heads[layer], len(self._pool.k[layer])
        plan = self.plan(shape)
        self._add(self._backend.by_slot(plan, received, slots, heads, self._by_head))

    @property
    def _repeated(self) -> Tensor | None:
        """bool [T], rows whose attention does not count; None: all counts."""
        if self._again is None or self._alive is None:
            return self._again
        return self._again[self._alive]

    def _answer(self, streamed: StreamedAttention, call: AttentionCall, q: Tensor) -> Tensor:
        """The output of a layer over KV on the device and in host memory."""
        layer = call.layer
        pools = self._pool.k[layer], self._pool.v[layer]
        out, lse = streamed.run(layer, call.shape, q, pools, call.sinks)
        if layer in self._mass_heads:
            assert not self._by_head, "records in host memory are not observed by head"
            lse, heads = _counting(lse, self._repeated), self._mass_heads[layer]
            self._add(streamed.mass(layer, call.shape, q, pools[0], lse, heads))
        return out


def _counting(lse: Tensor, again: Tensor | None) -> Tensor:
    """The log-sum-exp of rows, with which those whose attention does not count give no mass."""
    if again is None:
        return lse
    return lse.masked_fill(again.to(lse.device)[:, None], math.inf)  # exp(-inf) = 0


def check_layer_types(config: Any) -> None:
    """Refuse layers whose attention our segments cannot express, from the config alone.

    Args:
        config: of a decoder.

    Raises:
        ModelError: names the types and the layers.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(config, "it is an encoder-decoder")
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise unsupported(config, "its config names no number of layers")
    kinds = getattr(config, "layer_types", None) or ()
    wrong = sorted({kind for kind in kinds if kind not in SUPPORTED_LAYERS})
    if wrong:
        places = [i for i, kind in enumerate(kinds) if kind in wrong]
        runs = " and ".join(SUPPORTED_LAYERS)
        raise _in_layers(
            config, f"layer_types is {', '.join(wrong)}; arbor runs {runs} exactly", places
        )
    every = range(config.num_hidden_layers)
    if config.num_hidden_layers > MOST_LAYERS:
        raise ModelError(
            "arch-unsupported",
            f"num_hidden_layers is {config.num_hidden_layers}; arbor runs up to {MOST_LAYERS:,}.",
            "Mend config.json.",
        )
    if getattr(config, "is_causal", True) is False:
        raise _in_layers(config, "attention is not causal", every)
    for part in (config, getattr(config, "attn_config", None)):
        if getattr(part, "alibi", False):
            raise _in_layers(config, "attention has a position bias (ALiBi)", every)
    # Llama 4: by a row's place in the batch, as if that were its place in the text; the same up to
    # `floor_scale` tokens
    unscaled = int(getattr(config, "floor_scale", 0) or 0)
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    if getattr(config, "attn_temperature_tuning", False) and longest > unscaled:
        without_rope = getattr(config, "no_rope_layers", None) or []
        layers = [i for i, rope in enumerate(without_rope) if not rope] or every
        raise _in_layers(config, "queries are scaled by position", layers)


def give_own_config(model: nn.Module) -> None:
    """Give a model a config of its own: what is set in it is not set for others made from one
    config."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        own = copies.get(id(module.__dict__.get("config")))
        if own is not None:
            module.config = own  # type: ignore[assignment]


def check_specs(specs: Sequence[LayerSpec | None], config: Any) -> tuple[LayerSpec, ...]:
    """The specs, if every layer attends once, causally, through our attention.

    Raises:
        ModelError: names the layers that do not.
    """
    for reason, places in (
        (
            "there is no attention KV that arbor could own",
            [i for i, spec in enumerate(specs) if spec is None],
        ),
        (
            "attention is computed several times",
            [i for i, spec in enumerate(specs) if spec and spec.calls > 1],
        ),
        (
            "attention has a mask of its own",
            [i for i, spec in enumerate(specs) if spec and not spec.causal],
        ),
    ):
        if places:
            raise _in_layers(config, reason, places)
    return tuple(spec for spec in specs if spec is not None)


def _in_layers(config: Any, reason: str, layers: Sequence[int]) -> ModelError:
    places = f"{'layers' if len(layers) > 1 else 'layer'} {_ranges(layers)}"
    return unsupported(config, f"in {places} {reason}", layers=list(layers))


def unsupported(config: Any, reason: str, **data: Any) -> ModelError:
    """The error of a model that arbor cannot run, by its type."""
    return ModelError(
        "arch-unsupported",
        f"model_type '{config.model_type}': {reason}.",
        "See 'arbor info MODEL'.",
        model_type=config.model_type,
        **data,
    )


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> '0-2, 5'."""
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], -2]:
        if number != previous + 1:
            parts.append(f"{start}-{previous}" if previous > start else str(start))
            start = number
        previous = number
    return ", ".join(parts)
