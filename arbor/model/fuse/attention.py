"""Attention layers of a decoder in few kernels, where that gives the bits of the layer's forward.

A fused layer multiplies q, k and v as one matrix where their weights are packed for that, and hands
its heads on before position embedding: the runner rotates them and writes K and V to their slots in
one call. Layers are found by structure, and each is compared with its own forward on random rows,
random tables of angles and random positions before it is changed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.fused.rotary import ROTARY_FORMS, RotaryForm, RotaryOps
from arbor.kernels.linear.layers import DenseJoint, JointLinear, dense_joint, joint_linear
from arbor.kernels.native import MOST_DIM
from arbor.model.attention import (
    Attend,
    AttentionCall,
    Rotation,
    answered_by,
    answering,
    has_arbors_attention,
)
from arbor.model.fuse.parts import Folded, Fused, install, joins_dense, random_rows, remove

logger = logging.getLogger(__name__)

# Names of the parts of a layer: projections of equal input, the last projection, norms of q and k.
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
OUTPUTS = ("o_proj", "dense")
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
CACHES = ("past_key_values", "cache")  # transformers' own KV, before and from 5.24 on
ROWS = 3
FAR = 1 << 20  # positions of a trial: from here to twice as far
DTYPES = (torch.float32, torch.bfloat16)
# Largest difference of what a joint product gives, relative to its size.
JOINT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: torch.finfo(torch.bfloat16).eps}


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer computes around its attention.

    Attributes:
        projections: names of the projections of its input.
        output: name of the projection of its result.
        norms: names of the norms of q and of k, before position embedding; None without.
        whole: whether these norm all heads of a row together, else each head.
        rotary: position embedding; None without.
        shape: of its attention, as it calls it.
        sinks: whether its attention has sinks.
        joint: its projections as one product, whose bits are the same if it is packed; None: one
            by one.
    """

    projections: tuple[str, ...]
    output: str
    norms: tuple[str, str] | None
    whole: bool
    rotary: RotaryForm | None
    shape: AttentionShape
    sinks: bool
    joint: JointLinear | DenseJoint | None = None


class FusedAttention(Fused):
    """An attention layer whose rotary embedding and write of K and V are one kernel."""

    _arbor_ops: Any
    _arbor_form: AttentionForm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The fused forward for rows of one forward pass of arbor's, else the layer's own."""
        attend = answering()
        x = args[0] if args else kwargs.get("hidden_states")
        tables = kwargs.get("position_embeddings")
        if (
            attend is None
            or len(args) > 1
            or not isinstance(x, Tensor)
            or not isinstance(tables, tuple)
            or kwargs.get("attention_mask") is not None
            or any(kwargs.get(name) is not None for name in CACHES)
            or torch.is_grad_enabled()
        ):
            return super().forward(*args, **kwargs)
        form = self._arbor_form
        q, k, v = self._heads(x[0], form)
        rotation = Rotation(tables[0][0], tables[1][0], form.rotary, self._arbor_ops)
        sinks = self.sinks if form.sinks else None
        out = attend(AttentionCall(self.layer_idx, form.shape, q, k, v, sinks, True, rotation))  # type: ignore[arg-type]
        return getattr(self, form.output)(out.reshape(1, len(out), -1)), None

    def _heads(self, rows: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows [T, d], normed: [T, H_q, D], [T, H_kv, D] each."""
        shape, joint = form.shape, form.joint
        count, dim = len(rows), shape.head_dim_qk
        heads = (shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads)
        if joint is not None and not joint.hooked:
            q, k, v = joint(rows).view(count, -1, dim).split(heads, dim=1)
        elif len(form.projections) == 1:
            q, k, v = getattr(self, form.projections[0])(rows).view(count, -1, dim).split(heads, 1)
        else:
            found = [getattr(self, name)(rows) for name in form.projections]
            q, k, v = (each.view(count, -1, dim) for each in found)
        if form.norms is not None:
            q, k = (
                norm(heads.flatten(1)).view(heads.shape) if form.whole else norm(heads)
                for norm, heads in (
                    (getattr(self, form.norms[0]), q),
                    (getattr(self, form.norms[1]), k),
                )
            )
        return q, k, v


@torch.inference_mode()
def fuse_attention(model: nn.Module, ops: RotaryOps) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Let the attention layers of a model compute in few kernels, in place.

    A layer is changed only if, for random rows, tables and positions far from the start, its
    queries, keys, values and result have the bits of its own forward. On CUDA q, k and v are then
    multiplied as one matrix, if that gives the same up to rounding. `arbor.model.fuse.parts.unfuse`
    gives all layers theirs back.

    Args:
        model: with arbor's attention, weights loaded and packed, norms fused, in eval mode.
        ops: the kernel; one that fails leaves all layers as they are, with one warning.

    Returns:
        Names of the fused layers, and name -> reason of those that look alike and stay.
    """
    fused: list[str] = []
    kept: dict[str, str] = {}
    calls = _calls(model) if has_arbors_attention(model) else {}
    for name, (module, arguments) in calls.items():
        if isinstance(module, FusedAttention):
            remove(module)
        try:
            reason = _fuse_layer(module, arguments, ops)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, loaders and CUDA fail in many ways
            for each, _ in calls.values():
                if isinstance(each, FusedAttention):
                    remove(each)
            lines = str(error).strip().splitlines() or [""]
            logger.warning("attention layers are not fused: %s: %s", type(error).__name__, lines[0])
            return (), {}
        if reason:
            kept[name] = reason
        else:
            fused.append(name)
    logger.debug("fused attention: %d", len(fused))
    if kept:
        name, reason = next(iter(kept.items()))
        logger.debug("attention not fused: %d, among them %s: %s", len(kept), name, reason)
    return tuple(fused), kept


def _parts(module: nn.Module) -> tuple[tuple[str, ...], str, tuple[str, str] | None] | None:
    """Names of a layer's projections, last projection and norms; None for any other module."""
    names = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    for projections, output, norms in product(PROJECTIONS, OUTPUTS, (None, *NORMS)):
        if names == {*projections, output, *(norms or ())}:
            return projections, output, norms
    return None


def _of_known_structure(module: nn.Module) -> tuple[tuple[str, ...], str, tuple[str, str] | None]:
    parts = _parts(module)
    assert parts is not None, "of a known structure"
    return parts


def _calls(model: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """The attention layers of a known structure and what a forward of `ROWS` tokens gives them."""
    found: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
    handles = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            names = ("hidden_states",) if args else ()
            if len(args) <= 1:
                found[name] = module, {**dict(zip(names, args, strict=True)), **kwargs}

        return hook

    for name, module in model.named_modules():
        if _parts(module) is not None and isinstance(getattr(module, "layer_idx", None), int):
            handles.append(module.register_forward_pre_hook(note(name), with_kwargs=True))
    try:
        if handles:
            device = next(model.parameters()).device
            ids = torch.zeros(1, ROWS, dtype=torch.int64, device=device)
            with answered_by(_zeros):
                model(
                    input_ids=ids,
                    position_ids=torch.arange(ROWS, device=device)[None],
                    use_cache=False,
                )
    finally:
        for handle in handles:
            handle.remove()
    return found


def _zeros(call: AttentionCall) -> Tensor:
    return call.q.new_zeros(len(call.q), call.shape.num_qo_heads, call.shape.head_dim_vo)


class _Answer(Attend):
    """Answers with given numbers, and keeps the call."""

    def __init__(self, ops: RotaryOps) -> None:
        self.ops = ops
        self.calls: list[AttentionCall] = []
        self.heads: list[Tensor] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        q, k = call.q, call.k
        if call.rotation is not None:
            rotation = call.rotation
            q, k = self.ops.rotate(q, k, rotation.cos, rotation.sin, rotation.form)
        self.calls.append(call)
        self.heads = [q, k, call.v]
        generator = torch.Generator(q.device).manual_seed(1)
        size = (len(q), call.shape.num_qo_heads, call.shape.head_dim_vo)
        made: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        return torch.randn(size, generator=generator, **made).to(q.dtype)


def _fuse_layer(module: Any, arguments: dict[str, Any], ops: RotaryOps) -> str:
    """Fuse a layer in the form whose bits are its own; the reason if it stays."""
    x, tables = arguments.get("hidden_states"), arguments.get("position_embeddings")
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.shape[:2] != (1, ROWS):
        return "its input is not rows of a known dtype"
    if not isinstance(tables, tuple) or len(tables) != 2:
        return "it is given no tables of angles"
    if any(isinstance(each, Mapping | list) for each in arguments.values()):
        return "it is given what layers share"
    if any(each.dtype not in DTYPES or each.shape[:2] != (1, ROWS) for each in tables):
        return "its tables of angles are of an unknown kind"
    generator = torch.Generator(x.device).manual_seed(0)
    made: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    random = {
        **arguments,
        "hidden_states": random_rows(ROWS, x.shape[-1], x, (1.0, 0.1, 8.0), generator),
        "position_embeddings": tuple(
            torch.randn(each.shape, generator=generator, **made).to(each.dtype) for each in tables
        ),
    }
    positions = arguments.get("position_ids")
    if isinstance(positions, Tensor):  # far from the start, where scales by position are not 1
        random["position_ids"] = FAR + torch.randint(
            FAR, positions.shape, generator=generator, device=x.device, dtype=positions.dtype
        )
    _, output, _ = _of_known_structure(module)
    last = module.get_submodule(output)
    setattr(module, output, Folded(x.shape[-1]))  # the time of its product, and other processes
    try:
        return _fuse_tried(module, random, ops)
    finally:
        setattr(module, output, last)


def _fuse_tried(module: Any, random: dict[str, Any], ops: RotaryOps) -> str:
    """Fuse a layer in the form that gives the same for random arguments; the reason if it stays."""
    own = _Answer(ops)
    with answered_by(own):
        wanted = module(**random)
    if not isinstance(wanted, tuple) or len(wanted) != 2 or wanted[1] is not None:
        return "its forward returns something other than a tensor"
    if len(own.calls) != 1 or not own.calls[0].causal:
        return "it does not attend once and causally"
    call = own.calls[0]
    if call.shape.head_dim_qk != call.shape.head_dim_vo or call.shape.head_dim_qk > MOST_DIM:
        return f"heads of {call.shape.head_dim_qk} and {call.shape.head_dim_vo} numbers"
    if call.sinks is not None and getattr(module, "sinks", None) is not call.sinks:
        return "its sinks are computed"
    for form in _forms(module, call):
        install(module, FusedAttention, ops, form)
        found = _Answer(ops)
        try:
            with answered_by(found):
                result = module(**random)
        except (RuntimeError, AssertionError):  # a form of other sizes
            remove(module)
            continue
        if torch.equal(result[0], wanted[0]) and all(map(torch.equal, found.heads, own.heads)):
            _join(module, random, ops, form, [wanted[0], *own.heads])
            return ""
        remove(module)
    return "its results differ in every known form"


def _join(
    module: Any,
    arguments: dict[str, Any],
    ops: RotaryOps,
    form: AttentionForm,
    wanted: Sequence[Tensor],
) -> None:
    """Multiply the projections of a fused layer as one where that gives the same up to rounding.

    wanted: the layer's result, and its queries, keys and values.
    """
    layers = [module.get_submodule(name) for name in form.projections]
    if form.joint is not None or len(layers) < 2 or not joins_dense(wanted[0]):
        return
    joint = dense_joint(layers)
    if joint is None:
        return
    module._arbor_form = dataclasses.replace(form, joint=joint)
    answer = _Answer(ops)
    with answered_by(answer):
        result, _ = module(**arguments)
    for got, right in zip((result, *answer.heads), wanted, strict=True):
        error = (got.float() - right.float()).norm() / right.float().norm()
        if not error <= JOINT_TOLERANCE[right.dtype]:
            module._arbor_form = form


def _forms(module: nn.Module, call: AttentionCall) -> Iterator[AttentionForm]:
    """The forms a layer may have, each projection packed with the others where that is possible."""
    projections, output, norms = _of_known_structure(module)
    layers = [module.get_submodule(name) for name in projections]
    joint = joint_linear(layers) if len(layers) > 1 else None
    for whole, rotary in product((False, True) if norms else (False,), (*ROTARY_FORMS, None)):
        sinks = call.sinks is not None
        yield AttentionForm(projections, output, norms, whole, rotary, call.shape, sinks, joint)
