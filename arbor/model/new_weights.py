"""NewWeights: tensors that replace weights of a loaded model, checked before any does."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from arbor.errors import UsageError, did_you_mean
from arbor.kernels.linear.blocks import BlockEmbedding, BlockLinear, in_single_blocks
from arbor.kernels.linear.experts import BlockExperts
from arbor.kernels.linear.layers import DENSE, PackedLinear

Change = tuple[object, str, object]  # what has an attribute, its name, and its new value


class NewWeights:
    """New weights of a model that was loaded, and perhaps packed, fused or in blocks.

    A linear layer that was packed, or has blocks of a GGUF file, becomes one of plain numbers, to
    be packed anew; an embedding or experts in blocks become single numbers. Weights that are tied
    change together.

    Args:
        model: as loaded.
        given: by the names of its state dict.

    Attributes:
        digests: of each new weight, by the first of its names.

    Raises:
        UsageError: a weight does not fit, by its name; nothing has changed.
    """

    def __init__(
        self, model: nn.Module, given: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        self._model = model
        unloaded = _without_weights(model)
        known = unloaded.state_dict()
        names = _tied_names(unloaded)
        kept = dict(_tensors(model))
        like = next(model.parameters())
        new: dict[str, Tensor] = {}
        for name, tensor in _pairs(given):
            if name not in known:
                raise _refused(f"the model has no '{name}'.", did_you_mean(name, known) + NAMES)
            if tensor.shape != known[name].shape:
                shapes = [" x ".join(map(str, each.shape)) for each in (known[name], tensor)]
                raise _refused(f"'{name}' is {shapes[0]}, and was given as {shapes[1]}.")
            # a layer that was packed, or is in blocks, has no parameter of that name any more
            layer = model.get_submodule(name.rpartition(".")[0])
            dtype = kept[name].dtype if name in kept else getattr(layer, "dtype", like.dtype)
            value = tensor.detach().to(like.device, dtype, copy=True).contiguous()
            if not bool(value.isfinite().all()):
                raise _refused(f"'{name}' holds numbers that {_name(dtype)} does not, or NaN.")
            before = new.setdefault(names[name][0], value)
            if before is not value and not torch.equal(before, value):
                raise _refused(f"two values for '{names[name][0]}', the second as '{name}'.")
        if not new:
            raise _refused("no weights were given.", "An iterator can be read once only.")
        self.digests = {name: _digest(each) for name, each in new.items()}
        every = {each: value for name, value in new.items() for each in names[name]}
        self._changes = [it for name in every for it in self._change(name, every, unloaded)]

    def put(self) -> None:
        """Put the weights in place, or at the second call the former ones back; the model is to be
        packed and fused anew.

        In between, the former ones are kept and the new ones are the model's alone.
        """
        changes, self._changes = self._changes, []
        while changes:
            owner, name, value = changes.pop()
            self._changes.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def _change(self, name: str, new: Mapping[str, Tensor], unloaded: Any) -> Iterator[Change]:
        """What puts one weight in its place."""
        place, _, key = name.rpartition(".")
        module: Any = self._model.get_submodule(place)
        value = new[name]
        if isinstance(module, PackedLinear | BlockLinear):
            if key == "weight":
                layer = unloaded.get_submodule(place)
                bias = new.get(f"{place}.bias", module.bias)
                layer.weight = nn.Parameter(value, requires_grad=False)
                if bias is not None:
                    layer.bias = nn.Parameter(bias.to(value.dtype), requires_grad=False)
                above, _, own = place.rpartition(".")
                yield self._model.get_submodule(above), own, layer.eval()
            elif f"{place}.weight" not in new:
                before: Any = getattr(module, key)
                yield module, key, value.to(before.dtype)
        elif isinstance(module, BlockEmbedding):
            yield module, "table", in_single_blocks(value)
        elif isinstance(module, BlockExperts):
            names = ("gate", "up") if key == "gate_up_proj" else ("down",)
            for part, experts in zip(names, value.chunk(len(names), dim=1), strict=True):
                yield module, part, tuple(map(in_single_blocks, experts))
        else:
            kept: Any = getattr(module, key, None)
            scaled = isinstance(module, nn.Linear) and set(dict(_tensors(module))) - LINEAR
            plain = type(kept) in (nn.Parameter, Tensor) and kept.dtype in DENSE
            if scaled or not plain or kept.shape != value.shape:
                raise _refused(
                    f"'{name}' is quantised in {type(module).__name__}.",
                    "Load a model that is not quantised.",
                )
            yield kept, "data", value


LINEAR = {"weight", "bias"}  # of a linear layer that is not quantised
NAMES = "Names are those of the model's state_dict()."


def _without_weights(model: Any) -> Any:
    """The model as its class makes it, its tensors without memory."""
    config = copy.deepcopy(model.config)  # transformers writes to it
    with torch.device("meta"):
        return type(model)(config)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers with each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Of each name of a parameter or buffer, all names that it has."""
    groups: dict[int, list[str]] = {}
    for name, each in _tensors(model):
        groups.setdefault(id(each), []).append(name)
    return {name: names for names in groups.values() for name in names}


def _pairs(given: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights that were given, each dense and of numbers."""
    wrong = _refused(
        f"weights are given as {type(given).__name__}.",
        "Give a state_dict(), or pairs of a name and a tensor.",
    )
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise wrong
    for pair in given.items() if isinstance(given, Mapping) else given:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise wrong
        name, tensor = pair
        if type(tensor) not in (Tensor, nn.Parameter):
            raise _refused(
                f"'{name}' is a {type(tensor).__name__}.",
                "Give whole tensors; of a DTensor, full_tensor().",
            )
        if tensor.layout != torch.strided or tensor.is_meta or not tensor.is_floating_point():
            kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}".replace("torch.", "")
            raise _refused(f"'{name}' is {kind}.", "Give dense tensors of floating-point numbers.")
        yield name, tensor


def _digest(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refused(what: str, hint: str = NAMES) -> UsageError:
    return UsageError("updated-weights", f"update_weights: {what}", hint)
