"""All layers of a decoder as one native call, where that gives the bits of the model's own loop.

Decoder layers are found by structure: attention and a gated part whose modules are fused, each
added to its input, with norms before, after, or both. The model's embedding, tables of angles,
final norm and head stay its own modules. The whole is compared with the loop over its layers on a
random batch before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.fused.native_layers import LayerParts, NativeLayers, Norm
from arbor.kernels.linear.layers import native_products
from arbor.kernels.native import head_dim_fits, native_library
from arbor.model.fuse.attention import FusedAttention
from arbor.model.fuse.direct import DirectForward, direct_forward
from arbor.model.fuse.parts import FusedGated, FusedNorm
from arbor.model.layers import InPlaceOfLayers, StoppableLayers
from arbor.model.plan import ForwardPlan, Segment, plan_forward

Tables = tuple[Tensor, Tensor]  # cos and sin of the rows of a batch, [T, numbers]

# How the call gets its state and tables: from the model's parts, called directly; from the model's
# own forward, whose loop finds the call in place of all layers; or in place of the last layer, as
# layers have tables of their own (Gemma 3) and others stand for those before to note them.
Form = Literal["direct", "one table", "several tables"]
FORMS: tuple[Form, ...] = get_args(Form)

# Names of norms by place: before and after the attention, before and after the gated part.
PLACES = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", None, "pre_feedforward_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)


class ReadsPool(Protocol):
    """What answers attention calls in a forward of the runner, and says what they would read.

    write: int64 [T], where a row's K and V go.
    pools: K and V of each layer.
    observed: layers whose attention mass is summed, in their order.
    counted: float32 [T], what a row counts for there; None: 1.
    """

    write: Tensor
    pools: tuple[Sequence[Tensor], Sequence[Tensor]]
    observed: Sequence[int]

    @property
    def counted(self) -> Tensor | None: ...

    def plan(self, shape: AttentionShape) -> Any:
        """The backend's plan of the forward for layers of this shape."""
        ...

    def received(self, shape: AttentionShape) -> Tensor:
        """What the attention mass of a layer of this shape is added to."""
        ...

    def observe(self, layer: int, shape: AttentionShape, received: Tensor) -> None:
        """Takes the attention mass of an observed layer."""
        ...


class Noted(InPlaceOfLayers):
    """In place of a layer: its tables of angles are noted, for the call after it.

    Args:
        tables: where to.
        like, in_tuple: see `InPlaceOfLayers`.
    """

    def __init__(self, tables: list[Tables], like: nn.Module, in_tuple: bool) -> None:
        super().__init__(like, in_tuple)
        self.__dict__["tables"] = tables

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The state as it came."""
        self.__dict__["tables"].append(_of_batch(kwargs["position_embeddings"]))
        return self.returned(hidden_states)


class WholeDecoder(InPlaceOfLayers):
    """In place of all layers: one native call.

    Args:
        native: the layers.
        layers: the decoder's own.
        form: how it gets its state and tables.
        direct: the model's parts, for the form of that name.
    """

    form: Form
    direct: DirectForward | None

    def __init__(
        self,
        native: NativeLayers,
        layers: StoppableLayers,
        form: Form,
        direct: DirectForward | None = None,
    ) -> None:
        super().__init__(layers[0], layers.in_tuples)
        watched = [each for layer in layers for each in layer.modules()]
        watched += direct.passed_over if direct is not None else ()
        hooks: list[Any] = [each._forward_hooks for each in watched]
        hooks += [each._forward_pre_hooks for each in watched]
        tables: list[Tables] = []
        before = list(layers)[:-1] if form == "several tables" else []
        noted = [Noted(tables, each, layers.in_tuples) for each in before]
        self.__dict__.update(native=native, hooks=hooks, tables=tables, reads=None)
        self.__dict__.update(form=form, direct=direct)
        self.__dict__.update(replaced=partial(layers.replaced_by, *noted, self))

    @contextmanager
    def reading(self, reads: ReadsPool) -> Iterator[None]:
        """Within, this runs in place of the layers, and the model's own loop runs over it.

        Args:
            reads: what the forward within reads.
        """
        self.__dict__["reads"] = reads
        try:
            with nullcontext() if self.direct is not None else self.__dict__["replaced"]():
                yield
        finally:
            self.__dict__["reads"] = None
            self.__dict__["tables"].clear()

    @property
    def hooked(self) -> bool:
        """Whether a module that one call for all layers does not run has hooks."""
        return any(self.__dict__["hooks"])

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The state [1, T, d] after the last layer."""
        return self.returned(self.state(hidden_states, kwargs["position_embeddings"]))

    def state(self, hidden_states: Tensor, position_embeddings: Tables) -> Tensor:
        """The state [1, T, d] after the last layer; `hidden_states` is that before the first."""
        reads: ReadsPool = self.__dict__["reads"]
        tables = [*self.__dict__["tables"], _of_batch(position_embeddings)]
        native: NativeLayers = self.__dict__["native"]
        given = reads.write, reads.pools, reads.plan
        if not reads.observed:
            return native.run(hidden_states[0], tables, *given)[None]
        received = {layer: reads.received(native.shapes[layer]) for layer in reads.observed}
        state = native.run(hidden_states[0], tables, *given, received, reads.counted)
        for layer, mass in received.items():
            reads.observe(layer, native.shapes[layer], mass)
        return state[None]


def _of_batch(tables: Tables) -> Tables:
    """Tables of angles as layers are given them, without the dimension of the batch."""
    cos, sin = tables
    return cos[0], sin[0]


def whole_decoder(model: nn.Module, layers: StoppableLayers, form: Form) -> WholeDecoder | str:
    """All layers as one call, not compared with anything yet; or the reason why they are not.

    Args:
        model: a `*ForCausalLM`.
        layers: the decoder's.
        form: see `WholeDecoder`.
    """
    direct = direct_forward(model, layers) if form == "direct" else None
    if form == "direct" and direct is None:
        return "its forward has other parts"
    library = native_library()
    if library is None:
        return "the native kernels are not built"
    found: list[LayerParts] = []
    for index, layer in enumerate(layers):
        parts = _parts(layer)
        if isinstance(parts, str):
            return f"layer {index}: {parts}"
        found.append(parts)
    kinds = {(each.projections[0].number, each.projections[0].inputs) for each in found}
    if len(kinds) > 1:
        return "its layers are of several widths or dtypes"
    dtype = torch.bfloat16 if found[0].projections[0].number else torch.float32
    return WholeDecoder(NativeLayers(library, found, dtype), layers, form, direct)


def _parts(layer: nn.Module) -> LayerParts | str:
    """What a layer consists of, or why it is not known."""
    children = {
        name: child
        for name, child in layer.named_children()
        if not isinstance(child, nn.Dropout | nn.Identity)
    }
    attention = [each for each in children.values() if isinstance(each, FusedAttention)]
    gated = [each for each in children.values() if isinstance(each, FusedGated)]
    if len(attention) != 1 or len(gated) != 1:
        return "no fused attention, or no fused gated part"
    norms = {name: each for name, each in children.items() if isinstance(each, FusedNorm)}
    places = [each for each in PLACES if {name for name in each if name} == set(norms)]
    if not places or len(norms) + 2 != len(children):
        return f"it consists of {', '.join(children)}"
    form = attention[0]._arbor_form
    if form.sinks or not head_dim_fits(form.shape.head_dim_qk):
        return "its attention is of an unknown kind"
    apart = [getattr(attention[0], name) for name in form.projections]
    products = [
        native_products(each)
        for each in (
            apart if form.joint is None else [form.joint],
            [getattr(attention[0], form.output)],
            gated[0].projections,
            [gated[0].down_proj],
        )
    ]
    if any(each is None for each in products):
        return "a linear layer is not packed for the native kernels"
    qkv, output, gate_up, down = (each for each in products if each is not None)
    head_norms = None
    if form.norms is not None:
        both = [getattr(attention[0], name) for name in form.norms]
        if not all(isinstance(each, FusedNorm) for each in both):
            return "the norms of its heads are not fused"
        head_norms = _norm(both[0]), _norm(both[1])
    at = [None if name is None else _norm(norms[name]) for name in places[0]]
    return LayerParts(
        shape=form.shape,
        projections=qkv,
        head_norms=head_norms,
        whole=form.whole,
        rotary=form.rotary,
        output=output,
        gate_up=gate_up,
        activation=gated[0]._arbor_form,
        down=down,
        before=(at[0], at[2]),
        after=(at[1], at[3]),
        factor=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _norm(module: FusedNorm) -> Norm:
    weight = module.weight
    assert isinstance(weight, Tensor), "a norm of a known structure"
    return Norm(weight.detach().contiguous(), module.epsilon, module._arbor_form)


# A batch of three segments, and their next tokens.
TRIAL_ROWS = (1, 2, 5)
TRIAL_SLOTS = sum(TRIAL_ROWS) + len(TRIAL_ROWS)


def trial_plans(vocabulary: int) -> list[ForwardPlan]:
    """Two forwards of random ids over the first `TRIAL_SLOTS` slots, the second after the first."""
    random = np.random.default_rng(0)
    ends = np.cumsum([count + 1 for count in TRIAL_ROWS])
    slots = [np.arange(end - count - 1, end) for count, end in zip(TRIAL_ROWS, ends, strict=True)]

    def segment(own: NDArray[np.int64], first: int) -> Segment:
        new = np.arange(first, len(own))
        ids = random.integers(0, vocabulary, len(new)).tolist()
        tail = own.astype(np.int32)
        return Segment((), ids, new, tail, tail[first:], logits=len(new))

    begin = [segment(own[:-1], 0) for own in slots]
    return [plan_forward(begin), plan_forward([segment(own, len(own) - 1) for own in slots])]
