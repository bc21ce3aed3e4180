"""ModelInfo: a model's sizes, and whether arbor runs it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from arbor.model.names import BYTES_OF, INT8
from arbor.model.sampling_params import Sampling

if TYPE_CHECKING:
    from arbor.kernels.attention.base import AttentionShape

# Parameters below which one thread is the default: more would mostly wait for each other.
SMALL_MODEL = 50_000_000


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model's sizes, and whether arbor runs it.

    Attributes:
        id: as the user wrote it.
        revision: commit of a model of the Hub; None for others.
        architecture: class name, e.g. ``LlamaForCausalLM``.
        model_type: as in the config.
        supported: whether arbor runs it exactly.
        reason: why not; empty if it does.
        layers: decoder layers.
        num_qo_heads, num_kv_heads, head_dim: of the first layer, as probed; 0 if unsupported.
        head_dims: every size of a head, of keys or values, in any layer; increasing.
        window: the shortest sliding window of any layer, None if there is none.
        dtype: of the weights, and of the KV unless `kv_dtype` says otherwise.
        kv_bytes_per_token: over all layers; 0 if unsupported.
        kv_bytes_int8: bytes per token of 8-bit KV and its scales, likewise.
        parameters: number of weights.
        weights_bytes: what they take as they are loaded, before any is rounded to 8 bits.
        context: longest path that runs exactly, tokens.
        vocabulary: number of token ids.
        kv_dtype: of the KV, as in `Solver`.
        weights: of linear layers, as in `Solver`.
    """

    id: str
    revision: str | None
    architecture: str
    model_type: str
    supported: bool
    reason: str
    layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dims: tuple[int, ...]
    window: int | None
    dtype: str
    kv_bytes_per_token: int
    kv_bytes_int8: int
    parameters: int
    weights_bytes: int
    context: int
    vocabulary: int
    kv_dtype: str = "auto"
    weights: str = "auto"

    def with_int8_kv(self) -> ModelInfo:
        """The same model with 8-bit KV."""
        return replace(self, kv_bytes_per_token=self.kv_bytes_int8, kv_dtype=INT8)

    def with_dense_weights(self) -> ModelInfo:
        """The same model with all weights as numbers of its dtype."""
        return replace(self, weights_bytes=self.parameters * BYTES_OF[self.dtype])

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return asdict(self)

    def to_header(self) -> dict[str, Any]:
        """The fields that a trace's header holds; `kv_dtype` and `weights` only where they are not
        ``auto``."""
        usual = [name for name in ("kv_dtype", "weights") if getattr(self, name) == "auto"]
        left_out = ("kv_bytes_int8", "weights_bytes", *usual)
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class Description:
    """What a plan needs of a model.

    Attributes:
        tokenizer: encodes as the model's Hugging Face tokenizer does.
        info: sizes of the model, and whether it is supported.
        sampling: the sampling that the model's authors recommend.
    """

    tokenizer: Any
    info: ModelInfo
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Files(Description):
    """A model's config and tokenizer.

    Attributes:
        tokenizer: a Hugging Face tokenizer.
        shapes: the distinct attention shapes of the model's layers.
    """

    shapes: tuple[AttentionShape, ...]
