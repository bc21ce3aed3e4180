"""The weights of a GGUF file in transformers' model, matrices in the blocks that the file has.

The file is mapped, and linear layers, embeddings and experts read their rows there. Only norms,
biases, and the queries and keys of Llama are copied: llama.cpp has the rows of these in another
order. Names are transformers' own; it also converts the architectures that are not known here.

The file must stay as it is while its model runs: whatever is written to it becomes weights.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from arbor.errors import ModelError
from arbor.kernels.linear.blocks import (
    KINDS,
    NUMBER_OF,
    RUN,
    BlockEmbedding,
    BlockLinear,
    BlockWeight,
    decoded,
)
from arbor.kernels.linear.experts import BlockExperts
from arbor.kernels.native import native_library
from arbor.model.gguf.header import OTHER_CONVERSION, GGUFHeader, TensorPlace
from arbor.model.gguf.unread import check_all_read

logger = logging.getLogger(__name__)

QWEN = ("qwen2", "qwen2moe", "qwen3", "qwen3moe")
ARCHITECTURES = ("llama", "smollm3", *QWEN, "gemma2", "gemma3", "phi3")
INTERLEAVED = ("llama", "smollm3")  # heads of q and k have the two halves of a rotation in turn
OFFSET = ("gemma2", "gemma3")  # norms are written with 1 added
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPERT_DIMENSIONS = 3  # of the tensors of all experts of a layer


def read_model(
    header: GGUFHeader,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dense: bool = False,
    linear_only: bool = False,
    on_tensor: Callable[[int, int], None] = lambda done, tensors: None,
) -> Any | None:
    """The model of a file, in eval mode; None for an architecture that is not known here.

    Args:
        header: of the file, checked.
        config: of the model.
        dtype: of what is computed, and of weights that are not in blocks.
        device: of the weights; they are in blocks where the native kernels compute.
        dense: whether all weights become numbers of `dtype` in any case.
        linear_only: whether linear layers stay in blocks in any case, and nothing else does: they
            are cut and decoded later.
        on_tensor: called with the number of tensors read, and of all.

    Raises:
        ModelError: a tensor is missing, has another shape than the settings say, or has no place.
    """
    if header.get("general.architecture") not in ARCHITECTURES:
        return None
    try:
        model = _without_weights(config, dtype)
    except (RuntimeError, OverflowError) as error:  # a layer is allocated before it is let go
        raise _refused(header, f"its settings name no layers that can be made: {error}") from error
    places = _places(header, model)
    _check(header, model, places)
    blocks = not dense and device.type == "cpu" and _computes(dtype)
    reader = _Reader(header, config, dtype, device, blocks or linear_only, linear_only)
    done = 0
    for name, module in list(model.named_modules()):
        own = {
            key: places[f"{name}.{key}".lstrip(".")]
            for key, _ in module.named_parameters(recurse=False)
            if f"{name}.{key}".lstrip(".") in places
        }
        if own:
            on_tensor(done, len(places))
            done += len(own)
            reader.fill(model, name, module, own)
    if config.tie_word_embeddings:
        _tie(model, dtype)
    reader.report()
    return model.to(device).eval()


def kept_bytes(header: GGUFHeader, dtype: torch.dtype) -> int:
    """Bytes of the weights of `read_model` on a CPU; 0 for an architecture that is not known."""
    if header.get("general.architecture") not in ARCHITECTURES or not _computes(dtype):
        return 0
    return sum(
        each.length if _is_read_in_blocks(each) else prod(each.shape) * dtype.itemsize
        for each in header.tensors
    )


def _without_weights(config: Any, dtype: torch.dtype) -> Any:
    """The model with parameters that have no memory; its buffers are computed."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _places(header: GGUFHeader, model: Any) -> dict[str, tuple[TensorPlace, ...]]:
    """The tensors of each parameter; those of experts' gates and factors are two."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = header.get("general.architecture")
    architecture = next(each for each, name in MODEL_ARCH_NAMES.items() if name == kind)
    names = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tensors = {each.name: each for each in header.tensors}
    found = {}
    for name in model.state_dict():
        layer, is_of_experts, part = name.partition(".mlp.experts.")
        if is_of_experts:
            place = f"blk.{layer.rpartition('.')[2]}.ffn_{{}}_exps.weight"
            parts = ("gate", "up") if part == "gate_up_proj" else ("down",)
            own = [place.format(each) for each in parts]
        else:
            own = [names.get_name(name, try_suffixes=(".weight", ".bias")) or ""]
        if all(each in tensors for each in own):
            found[name] = tuple(tensors[each] for each in own)
    return found


def _check(header: GGUFHeader, model: Any, places: Mapping[str, tuple[TensorPlace, ...]]) -> None:
    """Refuse a file whose tensors are not those of the model.

    Raises:
        ModelError: one is missing, has another shape, or has no place.
    """
    head = "lm_head.weight"
    missing = []
    for name, parameter in model.state_dict().items():
        if parameter.device.type != "meta":
            continue
        own = places.get(name)
        if own is None:
            if name != head or not model.config.tie_word_embeddings:
                missing.append(name)
            continue
        wanted = tuple(parameter.shape)
        if _shape(own) not in (wanted, wanted[1:] if wanted[0] == 1 else wanted):
            raise _refused(
                header,
                f"weights have other shapes than its settings say: '{own[0].name}' is "
                f"{own[0].shape} for {wanted}",
            )
    if missing:
        lost = "1 tensor" if len(missing) == 1 else f"{len(missing)} tensors, among them"
        raise _refused(header, f"the weights lack {lost} {min(missing)}")
    check_all_read(header, {each.name for own in places.values() for each in own})


def _shape(places: tuple[TensorPlace, ...]) -> tuple[int, ...] | None:
    """The shape of a parameter of one tensor, or of experts' gates and factors; None if those
    differ."""
    first = places[0].shape
    if len(places) == 1:
        return first
    alike = len(first) == EXPERT_DIMENSIONS and all(each.shape == first for each in places)
    return (first[0], len(places) * first[1], first[2]) if alike else None


def _refused(header: GGUFHeader, what: str) -> ModelError:
    path = header.path
    return ModelError("model-incomplete", f"{path}: {what}.", OTHER_CONVERSION, model=str(path))


def _tie(model: Any, dtype: torch.dtype) -> None:
    """Let the head read the rows of the embedding."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, BlockEmbedding):
        model.lm_head = BlockLinear([embedding.table], None, dtype)
    else:
        model.lm_head.weight = embedding.weight


class _Reader:
    """Puts the tensors of a file into the modules of its model.

    Args:
        header: of the file.
        config, dtype, device: as in `read_model`.
        blocks: whether modules read blocks.
        linear_only: whether no others than linear layers do.

    Raises:
        ModelError: the file is not the one whose header was read.
    """

    def __init__(
        self,
        header: GGUFHeader,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        blocks: bool,
        linear_only: bool = False,
    ) -> None:
        self._header, self._dtype, self._device, self._blocks = header, dtype, device, blocks
        self._linear_only = linear_only
        kind = header.get("general.architecture")
        self._interleaved, self._offset = kind in INTERLEAVED, kind in OFFSET
        self._heads = {
            "attn_q": config.num_attention_heads,
            "attn_k": config.num_key_value_heads,
        }
        self._decoded: Counter[str] = Counter()
        with header.path.open("rb") as file:
            # private, since torch takes no memory that is read-only; nobody writes to it
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if len(self._map) != header.size:
            raise _refused(header, "it has changed since its header was read")

    def report(self) -> None:
        """Say which matrices are not in the blocks of the file."""
        for kind, count in self._decoded.items():
            logger.info(
                "%s: %d matrices of %s are decoded to %s%s",
                self._header.path.name,
                count,
                kind,
                str(self._dtype).removeprefix("torch."),
                ", which no kernel reads in blocks" if self._blocks else "",
            )

    def fill(
        self, model: Any, name: str, module: Any, places: Mapping[str, tuple[TensorPlace, ...]]
    ) -> None:
        """Gives a module its own parameters, or puts one that reads blocks in its place.

        Args:
            model: the whole.
            name, module: the part.
            places: tensors of each parameter.
        """
        replacement = self._in_blocks(module, places) if self._blocks else None
        if replacement is not None:
            model.set_submodule(name, replacement)
            return
        for key, own in places.items():
            shape = module.get_parameter(key).shape
            values = [self._values(each) for each in own]
            whole = values[0] if len(values) == 1 else torch.cat(values, dim=1)
            parameter = nn.Parameter(whole.view(shape).to(self._device), requires_grad=False)
            setattr(module, key, parameter)
            changed = (each for each in own if len(each.shape) > 1 and not self._is_dense(each))
            self._decoded.update(each.type_name for each in changed)

    def _in_blocks(
        self, module: Any, places: Mapping[str, tuple[TensorPlace, ...]]
    ) -> nn.Module | None:
        """The module with its weights in blocks; None if it is another, or no kernel reads them."""
        matrices = [each for own in places.values() for each in own if len(each.shape) > 1]
        if not all(map(_is_read_in_blocks, matrices)) or any(map(self._is_dense, matrices)):
            return None  # numbers as they are computed with are faster once they are packed
        if not matrices:
            return None
        if type(module) is nn.Linear:
            bias = self._values(places["bias"][0], torch.float32) if "bias" in places else None
            return BlockLinear([self._weight(places["weight"][0])], bias, self._dtype)
        if self._linear_only:
            return None
        if isinstance(module, nn.Embedding):
            scale = getattr(module, "embed_scale", None)
            if type(module) is nn.Embedding or isinstance(scale, Tensor):
                table = self._weight(places["weight"][0])
                return BlockEmbedding(table, self._dtype, scale, module.padding_idx)
        if {"gate_up_proj", "down_proj"} == places.keys():
            gate, up, down = (
                [self._weight(each, expert) for expert in range(each.shape[0])]
                for each in (*places["gate_up_proj"], *places["down_proj"])
            )
            return BlockExperts(gate, up, down, module.act_fn)
        return None

    def _weight(self, place: TensorPlace, expert: int | None = None) -> BlockWeight:
        """A matrix where it lies; the rows of an interleaved one are copied."""
        length = place.length if expert is None else place.length // place.shape[0]
        data = self._bytes(place.start + (expert or 0) * length, length).view(place.shape[-2], -1)
        return BlockWeight(self._in_order(place, data), place.type_name, place.shape[-1])

    def _values(self, place: TensorPlace, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers of a tensor, in the model's dtype unless another is given."""
        wanted = dtype or self._dtype
        offset = self._offset and place.name.endswith("norm.weight")
        if PLAIN.get(place.type_name) == wanted and not place.start % wanted.itemsize:
            whole = self._bytes(place.start, place.length).view(wanted)
        elif _is_read_in_blocks(place):
            data = self._bytes(place.start, place.length).view(prod(place.shape[:-1]), -1)
            matrix = BlockWeight(data, place.type_name, place.shape[-1])
            whole = matrix.dense(torch.float32 if offset else wanted)
        else:
            whole = self._by_gguf(place)
        whole = self._in_order(place, whole.view(place.shape))
        return (whole - 1 if offset else whole).to(wanted)

    def _is_dense(self, place: TensorPlace) -> bool:
        """Whether a tensor is in the model's dtype already: it is read where it lies."""
        return PLAIN.get(place.type_name) == self._dtype

    def _by_gguf(self, place: TensorPlace) -> Tensor:
        """float32, by the package `gguf`."""
        data = self._bytes(place.start, place.length)
        if place.type_name == "F64":
            return data.clone().view(torch.float64).float()
        return decoded(data.view(*place.shape[:-1], -1), place.type_name)

    def _in_order(self, place: TensorPlace, rows: Tensor) -> Tensor:
        """Rows of q and k in the order of transformers: the first halves of a head's pairs, then
        the second ones."""
        _, _, part = place.name.rpartition("blk.")
        heads = self._heads.get(part.split(".")[1]) if self._interleaved and part else None
        if heads is None:
            return rows
        pairs = rows.view(heads, -1, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _bytes(self, start: int, length: int) -> Tensor:
        """Some bytes of the file where they are mapped."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=length, offset=start)


def _computes(dtype: torch.dtype) -> bool:
    """Whether the native kernels are there and compute in a dtype."""
    return native_library() is not None and dtype in NUMBER_OF


def _is_read_in_blocks(place: TensorPlace) -> bool:
    return place.type_name in KINDS and place.shape[-1] % RUN == 0
