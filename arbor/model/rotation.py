"""How layers encode positions: rotations of pairs of numbers, found by comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from arbor.kernels.fused.rotary import ROTARY_FORMS, RotaryForm, rotate_by_torch
from arbor.model.attention import AttentionCall, answered_by
from arbor.retention.token_kv import PairRotation

_POSITIONS = (0, 1, 2, 7, 61, 500)


@torch.inference_mode()
def rotations_of(model: nn.Module, layers: Sequence[int]) -> dict[int, PairRotation | None]:
    """The rotation of each layer's queries and keys.

    A layer runs on the same rows with its tables of angles and with those of no rotation; the form
    that turns one result into the other is its own. Frequencies are the model's buffers that give
    the tables. Nothing is read from configs.

    Args:
        model: with arbor's attention.
        layers: which.

    Returns:
        layer -> rotation, of no pairs where the layer encodes no positions; None where it is of an
        unknown kind, or changes with the length of the text.
    """
    return {
        layer: None if call is None else _rotation(model, *call)
        for layer, call in _calls(model, layers).items()
    }


def _calls(
    model: nn.Module, layers: Sequence[int]
) -> dict[int, tuple[nn.Module, dict[str, Any]] | None]:
    """The attention of each layer, and what it is given for tokens at `_POSITIONS`; None without
    tables of angles."""
    found: dict[int, tuple[nn.Module, dict[str, Any]] | None] = dict.fromkeys(layers)

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = {**dict(zip(("hidden_states",), args, strict=False)), **kwargs}
        tables = given.get("position_embeddings")
        if isinstance(tables, tuple) and len(tables) == 2 and len(args) <= 1:
            found[module.layer_idx] = module, given  # type: ignore[index]

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if getattr(module, "layer_idx", None) in found
    ]
    device = next(model.parameters()).device
    positions = torch.tensor([_POSITIONS], device=device)
    try:
        with answered_by(_nothing):
            model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _nothing(call: AttentionCall) -> Tensor:
    return call.q.new_zeros(len(call.q), call.shape.num_qo_heads, call.shape.head_dim_vo)


def _rotation(model: nn.Module, module: nn.Module, given: dict[str, Any]) -> PairRotation | None:
    cos, sin = (table[0].float() for table in given["position_embeddings"])
    turned, form = _queries(module, given)
    if form is None:  # not fused: the queries are rotated already
        tables = given["position_embeddings"]
        still = torch.ones_like(tables[0]), torch.zeros_like(tables[1])
        plain, _ = _queries(module, {**given, "position_embeddings": still})
        if torch.equal(plain, turned):
            return PairRotation(False, cos.new_zeros(0).double())
        form = next((each for each in ROTARY_FORMS if _turns(plain, turned, cos, sin, each)), None)
    if form is None:
        return None
    count = form.rotated(cos) // 2
    # what each pair uses of the tables
    pair = slice(0, 2 * count, 2) if form.interleaved and not form.one_angle else slice(0, count)
    cos, sin = cos[:, pair], sin[:, pair]
    scale = float(cos[0].mean())
    positions = torch.tensor(_POSITIONS, dtype=torch.float64, device=cos.device)
    close = 2e-2 if given["position_embeddings"][0].dtype != torch.float32 else 1e-3
    for name, buffer in model.named_buffers():
        if not name.endswith("inv_freq") or buffer.shape != (count,):
            continue
        angles = positions[:, None] * buffer.double()
        if all(
            torch.allclose(scale * wave.float(), table, atol=close * scale)
            for wave, table in ((angles.cos(), cos), (angles.sin(), sin))
        ):
            return PairRotation(form.interleaved, buffer.double(), scale)
    return None


def _queries(module: nn.Module, given: dict[str, Any]) -> tuple[Tensor, RotaryForm | None]:
    """The queries of a layer, float32 [T, H_q, D], and how they are still to be rotated; None:
    they are."""
    calls: list[AttentionCall] = []

    def keep(call: AttentionCall) -> Tensor:
        calls.append(call)
        return _nothing(call)

    with answered_by(keep):
        module(**given)
    rotation = calls[0].rotation
    return calls[0].q.float(), None if rotation is None else rotation.form


def _turns(plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm) -> bool:
    if form.rotated(cos) > plain.shape[-1]:
        return False
    try:
        found = rotate_by_torch(plain, cos, sin, form)
    except RuntimeError:  # tables of another size
        return False
    size = float(turned.abs().max())
    return found.shape == turned.shape and torch.allclose(found, turned, atol=2e-2 * size)
