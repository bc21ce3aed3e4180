"""A model read and loaded: its config and tokenizer, then the weights, checked and packed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from arbor import components
from arbor.errors import ModelError, UsageError, logits_not_finite
from arbor.kernels.attention.base import AttentionBackend, AttentionShape
from arbor.kernels.attention.trial import BackendUnusable
from arbor.kernels.fused.parts import fused_ops
from arbor.kernels.fused.rotary import rotary_ops
from arbor.kernels.linear.layers import batch_dependent, pack_linears
from arbor.memory.out_of_memory import weights_too_large
from arbor.memory.pool import KVPool
from arbor.model.agreement_cache import Agreement, agreed_before, keep_agreement
from arbor.model.attention import has_arbors_attention, text_config
from arbor.model.describe import describe_attention, forward_fails, own_positions
from arbor.model.description_cache import keep_description
from arbor.model.fuse.attention import fuse_attention
from arbor.model.fuse.parts import fuse, unfuse
from arbor.model.graphs import CudaRecorder
from arbor.model.int8_weights import (
    WeightRounding,
    check_packed_before,
    check_rounding,
    round_weights,
)
from arbor.model.layers import find_layers
from arbor.model.loading import (
    ModelLocation,
    eos_ids,
    has_generation_config,
    left_out,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    sampling_defaults,
    sampling_in_gguf,
)
from arbor.model.model_info import Description, Files
from arbor.model.names import INT8
from arbor.model.parallel.ranks import Ranks
from arbor.model.parallel.shards import Division, division_of
from arbor.model.placement import (
    FLASHINFER,
    NATIVE,
    TRITON,
    dtype_name,
    flashinfer_computes,
    refuse_batch_dependent,
    runs_native,
)
from arbor.model.plan import Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.model.threads import torch_threads
from arbor.support.garbage import free_dropped, give_memory_back, look_for
from arbor.support.shortage import is_out_of_memory
from arbor.support.stages import show

LENGTH = 10
HEAD = 4  # tokens of the first path in the first of two forwards
LAST = 2  # tokens of the second path whose logits are compared
# Of both paths: in each forward some rows are not asked for, and most are not the last ones.
COMPARED = [*range(HEAD - 1, LENGTH), *range(2 * LENGTH - LAST, 2 * LENGTH)]
TOLERANCE = 1e-3  # seen: 1e-6
HALF_TOLERANCE = 0.2  # of bfloat16 and float16; seen: 0.03 in 18 layers


def paths(config: Any) -> list[list[int]]:
    """Two paths of `LENGTH` tokens, none of which is padding."""
    vocabulary = min(int(config.vocab_size), 1000)
    ids = [i for i in range(3, vocabulary) if i != getattr(config, "pad_token_id", None)]
    return [[ids[(at * 37 + i * 11) % len(ids)] for i in range(LENGTH)] for at in (0, 1)]


@torch.inference_mode()
def own_logits(model: Any) -> Tensor | None:
    """The model's own logits of the tokens `COMPARED`, [n, V] float32.

    Returns:
        None if its attention is arbor's already.

    Raises:
        ModelError: a model without a head for each token, with a forward that fails, or that takes
            positions from the tokens.
    """
    if has_arbors_attention(model):
        return None
    model.eval()
    ids = torch.tensor(paths(model.config.get_text_config()), device=model.device)
    _check_positions(model, ids[:1])
    logits: Tensor | None = getattr(_own_forward(model, ids), "logits", None)
    if logits is None or logits.shape[:2] != ids.shape:
        raise ModelError(
            "arch-unsupported",
            f"{type(model).__name__} gives no logits of each token.",
            "Take the model with its language head, as AutoModelForCausalLM loads it.",
            model_type=model.config.model_type,
        )
    return logits.flatten(0, 1)[COMPARED].float()


def _own_forward(model: Any, ids: Tensor, **given: Tensor) -> Any:
    """What the model's own forward gives.

    Raises:
        ModelError: it fails.
    """
    try:
        return model(input_ids=ids, use_cache=False, **given)
    except _Reached:
        return None
    except Exception as error:  # of transformers, or code that comes with weights
        if is_out_of_memory(error):
            raise
        raise ModelError(
            "model-incomplete",
            f"model_type '{model.config.model_type}': {forward_fails(error)}.",
            "Compare config.json with the weights; the model does not run in transformers either.",
            model_type=model.config.model_type,
        ) from error


class _Reached(Exception):
    """A forward has reached the first layer."""


def _check_positions(model: Any, ids: Tensor) -> None:
    """Refuse a model whose own positions are not 0, 1, …, by what reaches its first layer.

    Args:
        ids: int64 [1, n].

    Raises:
        ModelError: it is something else where the positions are given.
    """
    _, _, layers = find_layers(model, int(text_config(model).num_hidden_layers))
    found: list[Tensor] = []

    def note(layer: nn.Module, args: Any, kwargs: Any) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        found.extend([each for each in given if each.is_floating_point()][:1])
        raise _Reached

    hook = layers[0].register_forward_pre_hook(note, with_kwargs=True)
    positions = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
    try:
        _own_forward(model, ids)
        _own_forward(model, ids, position_ids=positions[None])
    finally:
        hook.remove()
    if len(found) == 2 and not torch.equal(*found):
        raise own_positions(model.config)


def arbor_logits(runner: ModelRunner) -> Tensor:
    """The logits of arbor's forward for the same tokens, [n, V].

    The first path runs in two parts, the second part together with the other path, so that the
    place of most rows in the batch is not their place on the path, nor in the logits.
    """
    first, second = paths(runner.config)
    pool = KVPool(runner.layer_kv, 2 * LENGTH, runner.dtype, runner.device)
    slots = np.arange(2 * LENGTH, dtype=np.int32)

    def part(ids: list[int], start: int, end: int, at: int, logits: int) -> Segment:
        own = slots[at : at + end]
        return Segment((), ids[start:end], np.arange(start, end), own, own[start:], logits)

    head = runner.forward(plan_forward([part(first, 0, HEAD, 0, 1)]), pool).logits
    rest = [part(first, HEAD, LENGTH, 0, LENGTH - HEAD), part(second, 0, LENGTH, LENGTH, LAST)]
    return torch.cat([head, runner.forward(plan_forward(rest), pool).logits])


def logit_error(runner: ModelRunner, own: Tensor) -> float:
    """How far arbor's logits are from `own`, relative to their length, for the median token:
    rounding alone sends some tokens to other experts."""
    return float(((arbor_logits(runner) - own).norm(dim=-1) / own.norm(dim=-1)).median())


def check_agreement(runner: ModelRunner, own: Tensor) -> None:
    """Refuse a model with other logits under arbor, for example by a row's place in the batch.

    Args:
        own: `own_logits` of the model before arbor's attention.

    Raises:
        ModelError: the difference is more than rounding.
    """
    if runner.ranks is not None and runner.ranks.number:
        arbor_logits(runner)  # the first rank has them, and compares
        return
    if not own.isfinite().all():
        raise logits_not_finite()
    error = logit_error(runner, own)
    half = runner.dtype in (torch.float16, torch.bfloat16)
    if not error <= (HALF_TOLERANCE if half else TOLERANCE):
        raise ModelError(
            "arch-unsupported",
            f"model_type '{runner.config.model_type}' computes something that arbor does not: its logits differ from "
            f"those of its own forward by {error:.2g} of their size, in the median of {len(own)} tokens.",
            "Take another model.",
            model_type=runner.config.model_type,
            error=error,
        )


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """The model, ready to run.

    Attributes:
        runner: over the model with arbor's attention.
        eos: token ids that end a text.
        backend: name of the attention backend in use.
        rounding: what `int8_weights` changed; None without it.
    """

    runner: ModelRunner
    eos: tuple[int, ...]
    backend: str
    rounding: WeightRounding | None = None


def read_files(
    source: ModelLocation, given: Any, tokenizer: Any, dtype: str, *, keep: bool
) -> Files:
    """Config and tokenizer of a model.

    Args:
        source: the model.
        given: the ready model; None: it is read.
        tokenizer: the ready tokenizer; None: it is read.
        dtype: as in `resolve_dtype`; that of a ready model is its own.
        keep: whether to keep the description for later processes.

    Raises:
        ModelError: unreadable.
    """
    config = load_config(source) if given is None else given.config
    tokenizer = tokenizer or load_tokenizer(source)
    dtype = dtype if given is None else dtype_name(given.dtype)
    info, shapes = describe_attention(config, source, dtype=dtype)
    generation = (
        load_generation_config(source)
        if given is None
        else getattr(given, "generation_config", None)
    )
    packed = source.gguf is not None
    sampling = sampling_in_gguf(source) if packed else sampling_defaults(generation)
    files = Files(tokenizer, info, sampling, shapes)
    # an unreadable generation config is reported whenever it is read
    if keep and (generation is not None or not has_generation_config(source)):
        keep_description(source, dtype, config, files)
    return files


def load_weights(
    source: ModelLocation,
    given: Any,
    files: Description,
    *,
    device: torch.device,
    backend: str,
    required: bool,
    deterministic: bool,
    cuda_graphs: bool,
    int8_kv: bool = False,
    int8_weights: bool = False,
    ranks: Ranks | None = None,
) -> Weights:
    """The weights, checked against the model's own forward, packed where that is faster.

    Args:
        source: the model.
        given: the ready model, which the caller puts back after an error; None: it is read.
        files: its description; the model is supported, and for a GPU it is read from its files.
        device: where it runs.
        backend: name of the attention backend.
        required: whether FlashInfer is required where it is the backend; else torch replaces it if
            it cannot run.
        deterministic: as in `Solver`; False: only where the native kernels compute the whole model.
        cuda_graphs: as in `Solver`.
        int8_kv: whether searches keep KV in 8 bits; the check of the logits does not.
        int8_weights: whether linear layers keep their weights in 8 bits; the logits are checked
            before they are rounded.
        ranks: the processes that hold the model together; parts of the model are then not fused,
            since linear layers add up over the ranks.

    Raises:
        ModelError: incomplete or unreadable.
        UsageError: `deterministic`, and layers of the model depend on the batch; or FlashInfer is
            required and cannot run; or weights cannot be in 8 bits here.
    """
    info = files.info
    if int8_weights:
        check_rounding(info.dtype, device)
    division = None if ranks is None else division_of(load_config(source), ranks.count)
    if division is not None and isinstance(files, Files):
        files = replace(files, shapes=shapes_of_rank(files.shapes, division))
    name, attend = _backend(files, device, backend, required, int8_kv)
    if given is None:
        free_dropped()  # earlier models, before this one takes room
        model = load_model(source, getattr(torch, info.dtype), device, division=division)
        look_for(model, info.parameters)
    else:
        model = given
    if ranks is not None and division is not None:
        ranks.loaded()
        _divide(model, division, ranks)
        if cuda_graphs and device.type == "cuda" and not ranks.number:
            logger.info("steps run without CUDA graphs: %d processes have the model", ranks.count)
    if given is not None:
        check_packed_before(model, INT8 if int8_weights else "auto")
    if deterministic:
        refuse_batch_dependent(model, device)
    elif name == NATIVE and runs_native(info, device):
        deterministic = not batch_dependent(model)  # at no measurable cost, see docs/budget.md
    show(f"checking and packing the weights of {source.label}")
    plain = given is None and ranks is None and not int8_weights and device.type == "cpu"
    how = (info.dtype, name, deterministic, int8_kv)
    known = agreed_before(source, how) if plain else None
    # the others would have to capture, check and replay the same steps
    graphs = cuda_graphs and device.type == "cuda" and not deterministic and ranks is None
    recorder = CudaRecorder(device) if graphs else None
    kv_dtype = torch.int8 if int8_kv else None
    own = own_logits(model) if known is None else None
    runner = ModelRunner(
        model, attend, recorder, deterministic=deterministic, kv_dtype=kv_dtype, ranks=ranks
    )
    packs = int8_weights or runner.device.type == "cpu" or deterministic
    ready = given is not None and not source.path
    if own is not None and (int8_weights or (packs and ready)):
        check_agreement(runner, own)  # a model that is refused keeps its weights
    rounding = None
    if int8_weights:
        rounding = round_weights(model, deterministic=deterministic)
    elif packs:
        pack_linears(model, deterministic=deterministic)
    _fuse(model, runner, known)
    if rounding is not None and own is not None:
        rounding = replace(rounding, logit_error=logit_error(runner, own))
    elif own is not None:
        check_agreement(runner, own)
        if plain:
            keep_agreement(source, how, Agreement(runner.layers_form))
    logger.info(
        "%s: %s weights, %s on %s, attention by %s",
        source.name,
        f"{info.parameters:,}",
        info.dtype,
        runner.device,
        type(attend).__name__,
    )
    if rounding is not None:
        logger.info("%s", rounding)
    if names := left_out(getattr(model, "generation_config", None)):
        logger.warning(
            "%s: its generation config sets %s, which transformers would apply and arbor leaves out",
            source.name,
            ", ".join(names),
        )
    give_memory_back()
    return Weights(runner, eos_ids(model, files.tokenizer), name, rounding)


def _fuse(model: Any, runner: ModelRunner, known: Agreement | None) -> None:
    """Fused kernels for parts of a model, packed before, where they compute what the parts do."""
    ops = fused_ops(runner.device)
    if ops is not None and runner.deterministic and not ops.row_invariant:
        ops = None
    if ops is None:
        unfuse(model)  # a ready model that ran elsewhere
        return
    with torch_threads(1):  # few numbers at a time, for which others would only be waited
        fuse(model, ops)
        rotary = rotary_ops(runner.device)
        if rotary is not None:
            fuse_attention(model, rotary)
            if known is not None and known.layers_form is None:
                logger.debug("layers run one by one, as before")
            elif reason := runner.fuse_layers(known.layers_form if known else None):
                logger.debug("layers run one by one: %s", reason)


def _divide(model: Any, division: Division, ranks: Ranks) -> None:
    """Leave this rank its part of the linear layers."""
    from arbor.model.parallel.layers import divide, put_on

    if division.note and not ranks.number:
        logger.warning("--tp %d: %s", division.count, division.note)
    ranks.has_heads = division.attention
    divide(model, division, ranks)
    if any(each.device != ranks.device for each in model.parameters()):
        put_on(model, ranks.device)


def shapes_of_rank(
    shapes: Sequence[AttentionShape], division: Division
) -> tuple[AttentionShape, ...]:
    """The attention shapes of a rank's part of a model."""
    if not division.attention:
        return tuple(shapes)
    return tuple(
        replace(
            each,
            num_qo_heads=each.num_qo_heads // division.count,
            num_kv_heads=max(1, each.num_kv_heads // division.count),
        )
        for each in shapes
    )


def _backend(
    files: Description, device: torch.device, name: str, required: bool, int8_kv: bool
) -> tuple[str, AttentionBackend]:
    """The attention backend and its name; on CUDA with every kernel this model needs tried once.

    Args:
        required: no other backend takes its place.
        int8_kv: kernels for 8-bit KV too.

    Raises:
        UsageError: it is required and cannot run; the message names the module.
    """
    while name in (TRITON, FLASHINFER):
        assert isinstance(files, Files), "read for a GPU"
        try:
            return name, _tried(files, device, name, int8_kv)
        except BackendUnusable as error:
            if required:
                other = "leave kv_dtype out" if int8_kv else "use --backend torch"
                raise UsageError(
                    "backend",
                    f"--backend {name}: {error}",
                    "Install arbor-search[cuda] and a C compiler (for FlashInfer the CUDA "
                    f"toolkit), or {other}.",
                    module=error.name,
                ) from error
            name = FLASHINFER if name == TRITON and flashinfer_computes(files.info) else "torch"
            logger.warning("attention runs in %s, slower: %s", name, error)
    return name, cast(AttentionBackend, components.build("backend", name))


def _tried(files: Files, device: torch.device, name: str, int8_kv: bool) -> AttentionBackend:
    """Triton's backend or FlashInfer's, tried.

    Raises:
        BackendUnusable: it cannot run.
    """
    dtype: torch.dtype = getattr(torch, files.info.dtype)
    try:
        if name == TRITON:
            from arbor.kernels.attention.triton_tree import TritonTree

            tree = TritonTree()
            tree.probe(files.shapes, dtype, device, int8_kv=int8_kv)
            return tree
        from arbor.kernels.attention.flashinfer_cascade import FlashInferCascade

        cascade = FlashInferCascade(device, dtype)
        cascade.probe(files.shapes)
        return cascade
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise weights_too_large(device, None) from error
