"""Scoring models: decoders whose outputs are scores instead of the logits of a vocabulary."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from arbor.errors import ModelError
from arbor.model.checkpoint import Checkpoint, ModelSettings
from arbor.model.loading import ModelLocation, load_model, weight_files
from arbor.model.model_info import Description
from arbor.model.names import check_dtype

# names of a score head in checkpoints: of most architectures, and of GPT-2 for tokens
HEADS = ("score", "classifier")


class ScoreCheckpoint(Checkpoint):
    """The model of a verifier, read in two steps like that of a search.

    Args:
        model: a directory, a Hub id, or ``builtin:sapling``.
        revision, dtype, device, backend, deterministic: see `Solver`.

    Raises:
        UsageError: invalid settings; nothing was read.
        ModelError: the model does not exist.

    Attributes:
        tokens: ids whose logits are the scores; None: the model has a score head.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None,
        dtype: str,
        device: str,
        backend: str,
        deterministic: bool,
    ) -> None:
        super().__init__(
            ModelSettings(
                model=model,
                revision=revision,
                dtype=check_dtype(dtype),
                device=device,
                backend=backend,
                deterministic=deterministic,
                cuda_graphs=False,  # nothing decodes
            )
        )
        self.tokens: Sequence[int] | None = None

    def _ready_model(self, files: Description) -> Any:
        dtype: torch.dtype = getattr(torch, files.info.dtype)
        if self.tokens is not None:
            return TokenScores(load_model(self.source, dtype, self.device), self.tokens)
        head = read_head(self.source)
        decoder = load_model(self.source, dtype, self.device, "AutoModel")
        wide, inputs = int(decoder.config.get_text_config().hidden_size), _inputs(head)
        if inputs != wide:
            raise ModelError(
                "reward-head",
                f"{self.source.label}: its score head reads {inputs} numbers of each token, and the "
                f"decoder gives {wide}.",
                "Copy config.json and the weights of one model there.",
                model=self.source.name,
            )
        return HeadScores(decoder, head.to(self.device, dtype))


class _Scores(nn.Module):
    """The part of a scoring model that is its decoder's, as `ModelRunner` needs it.

    Args:
        decoder: a Hugging Face model.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    @property
    def config(self) -> Any:
        """The decoder's config."""
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = self.decoder.device
        return device

    def set_attn_implementation(self, implementation: str) -> None:
        """Replace the decoder's attention."""
        self.decoder.set_attn_implementation(implementation)


class HeadScores(_Scores):
    """A score head on the last hidden states of a decoder without a language head.

    Args:
        decoder: a `*Model`.
        head: [.., hidden size] -> [.., labels].
    """

    def __init__(self, decoder: Any, head: nn.Module) -> None:
        super().__init__(decoder)
        self.head = head

    def forward(self, logits_to_keep: int | Tensor = 0, **inputs: Any) -> Any:
        """The scores of some rows, or of all, as `.logits` [1, n, labels]."""
        hidden = self.decoder(**inputs).last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.head(hidden))


class TokenScores(_Scores):
    """The logits of a few tokens of a decoder with its language head.

    Args:
        decoder: a `*ForCausalLM`.
        tokens: their ids.
    """

    def __init__(self, decoder: Any, tokens: Sequence[int]) -> None:
        super().__init__(decoder)
        self._tokens = list(tokens)

    def forward(self, **inputs: Any) -> Any:
        """The logits of the tokens after some rows, or after all, as `.logits` [1, n, tokens]."""
        return SimpleNamespace(logits=self.decoder(**inputs).logits[..., self._tokens])


def label_count(source: ModelLocation) -> int | None:
    """Labels of the score head in a model's weights; None without a head.

    The weights of a model of the Hub are downloaded.

    Raises:
        ModelError: tensors that are neither one linear layer nor two.
    """
    layers = _layers(source, _head_tensors(source))
    return layers[-1][0] if layers else None


def read_head(source: ModelLocation) -> nn.Module:
    """The score head in a model's weights: a linear layer, or two with a ReLU between them.

    Two layers are those of Qwen2.5-Math-PRM and Qwen2.5-Math-RM.

    Raises:
        ModelError: no head, or other tensors.
    """
    tensors = _head_tensors(source)
    layers = _layers(source, tensors)
    if not layers:
        raise no_head(source)
    one = len(layers) == 1
    linears = [
        nn.Linear(inputs, outputs, bias=f"{prefix}bias" in tensors, device="meta")
        for (outputs, inputs), prefix in zip(layers, _prefixes(one), strict=True)
    ]
    head = linears[0] if one else nn.Sequential(linears[0], nn.ReLU(), linears[1])
    head.load_state_dict(tensors, assign=True)
    return head


def no_head(source: ModelLocation) -> ModelError:
    """The error for a model without a score head."""
    return ModelError(
        "reward-head",
        f"{source.label} is not a reward model: its weights have no score head "
        f"({' or '.join(f'{name}.*' for name in HEADS)}).",
        "Name a model with one, such as a *ForSequenceClassification; or, where the logits of two "
        "tokens are its scores, use head=tags with good=… and bad=….",
        model=source.name,
    )


def _prefixes(one: bool) -> tuple[str, ...]:
    return ("",) if one else ("0.", "2.")


def _inputs(head: nn.Module) -> int:
    """Numbers of each token that a head reads."""
    return int(next(each for each in head.modules() if isinstance(each, nn.Linear)).in_features)


def _layers(source: ModelLocation, tensors: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """(outputs, inputs) of each layer of a head; none without tensors."""
    if not tensors:
        return []
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for prefixes in (_prefixes(True), _prefixes(False)):
        weights = {f"{prefix}weight" for prefix in prefixes}
        biases = {f"{prefix}bias" for prefix in prefixes}
        if weights <= shapes.keys() <= weights | biases:
            layers = [shapes[f"{prefix}weight"] for prefix in prefixes]
            if all(len(layer) == 2 for layer in layers) and all(
                before[0] == after[1] for before, after in itertools.pairwise(layers)
            ):
                return [(layer[0], layer[1]) for layer in layers]
    raise ModelError(
        "reward-head",
        f"{source.label}: its score head is neither one linear layer nor two with a ReLU between "
        f"them: {', '.join(f'{name} {list(shape)}' for name, shape in sorted(shapes.items()))}.",
        "Take another reward model.",
        model=source.name,
    )


def _head_tensors(source: ModelLocation) -> dict[str, Tensor]:
    """The tensors of the score head, by their names within it; none without one."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for path in weight_files(source):
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it cannot be iterated itself)
                    head, _, inner = name.partition(".")
                    if head in HEADS:
                        found[inner] = tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                "model-incomplete",
                f"{source.name}: {path.name} cannot be read: {error}",
                "Copy every *.safetensors file there.",
                model=source.name,
            ) from error
    return found
