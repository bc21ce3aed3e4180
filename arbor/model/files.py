"""What is read of a model before its weights: its description, and all of its settings files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arbor.model.model_info import ModelInfo
from arbor.model.sampling_params import Sampling

if TYPE_CHECKING:
    from arbor.kernels.attention.base import AttentionShape


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
