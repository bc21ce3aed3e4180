"""Finding a decoder's layers, stopping after one of them, and letting rows leave between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from arbor.errors import ModelError
from arbor.kernels.linear.blocks import BlockLinear
from arbor.kernels.linear.layers import PackedLinear

# Asked after each layer with (layer, state [T', d] of the rows still running, their places in the
# batch int64 [T'] on the CPU): bool [T'] of the rows that leave now, or None.
Leave = Callable[[int, Tensor, Tensor], Tensor | None]

# Arguments of decoder layers with an entry per row of the batch, and the dimension of the rows. The
# shapes of other tensors say nothing: a number of heads or experts may equal the number of rows.
ROW_ARGUMENTS = {
    "cache_position": 0,
    "per_layer_input": 1,
    "position_embeddings": 1,
    "position_ids": 1,
}


class InPlaceOfLayers(nn.Module):
    """One layer in place of all layers of a decoder.

    Args:
        like: a layer of the decoder, whose attributes the model's loop may read.
        in_tuple: whether the decoder's layers return tuples.
    """

    def __init__(self, like: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self.__dict__.update(like=like, in_tuple=in_tuple)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["like"], name)

    def returned(self, state: Tensor) -> Any:
        """A state [1, n, d] as a layer returns it."""
        return (state,) if self.__dict__["in_tuple"] else state


class Given(InPlaceOfLayers):
    """In place of all layers: a state that they left behind, whatever comes in.

    Args:
        state: [1, n, d].
        like, in_tuple: see `InPlaceOfLayers`.
    """

    def __init__(self, state: Tensor, like: nn.Module, in_tuple: bool) -> None:
        super().__init__(like, in_tuple)
        self.__dict__["state"] = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The state."""
        return self.returned(self.__dict__["state"])


class StoppableLayers(nn.ModuleList):
    """A decoder's own list of layers that can end early, or give way to a state (`giving`).

    The model's own loop runs over it, so its own norm and head still run, and state_dict keys do
    not change. (A loop of our own over the layers is silently wrong for models that pass different
    rotary embeddings to different layers.)
    """

    stop_after: int | None = None
    in_tuples = False  # whether the layers return tuples
    _instead: tuple[nn.Module, ...] | None = None

    @contextmanager
    def giving(self, state: Tensor) -> Iterator[None]:
        """Within, the model's loop gets this state [1, n, d] instead of what its layers compute."""
        with self.replaced_by(Given(state, self[0], self.in_tuples)):
            yield

    @contextmanager
    def replaced_by(self, *layers: nn.Module) -> Iterator[None]:
        """Within, the model's loop runs over these layers."""
        outer = self._instead
        # not by assignment, which would make them its own layers
        self.__dict__["_instead"] = layers
        try:
            yield
        finally:
            self.__dict__["_instead"] = outer

    def __iter__(self) -> Iterator[nn.Module]:
        if self._instead is not None:
            yield from self._instead
            return
        for index, layer in enumerate(super().__iter__()):
            if self.stop_after is not None and index > self.stop_after:
                return
            yield layer

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            # lazy: `for layer in self.layers[: n]` must see a stop that is decided during the loop
            return (layer for i, layer in enumerate(self) if i in range(*index.indices(len(self))))
        return super().__getitem__(index)


def install(model: nn.Module, count: int) -> StoppableLayers:
    """Replace the decoder's list of layers, in place, by a stoppable one.

    Args:
        model: a `*ForCausalLM`.
        count: layers the config promises.

    Raises:
        ModelError: no list of so many layers with attention was found.
    """
    parent, name, layers = find_layers(model, count)
    if not isinstance(layers, StoppableLayers):
        layers = StoppableLayers(list(layers))
        setattr(parent, name, layers)
    return layers


def find_layers(model: nn.Module, count: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that has the decoder's list of layers, the name it has there, and the list.

    Args, Raises: as `install`.
    """
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, StoppableLayers) or (
                isinstance(child, nn.ModuleList)
                and len(child) == count
                and all(any(hasattr(m, "layer_idx") for m in layer.modules()) for layer in child)
            ):
                return parent, name, child
    raise ModelError(
        "arch-unsupported",
        f"{type(model).__name__} keeps no list of {count} decoder layers with attention.",
        "See 'arbor info MODEL'.",
    )


def note_form(layers: StoppableLayers) -> Any:
    """A hook that records whether the layers return tuples; to be removed after a forward."""

    def hook(layer: nn.Module, args: Any, output: Any) -> None:
        layers.in_tuples = isinstance(output, tuple)

    return layers[0].register_forward_hook(hook)


class Tap:
    """Hooks on the layers for one forward: hidden states of chosen layers, rows that leave early.

    Args:
        layers: of the decoder.
        rows: T, rows of the batch.
        hidden: layers whose output is kept.
        leave: asked after each layer; None if no row leaves.
        last: the layer after which the forward ends.
        on_leave: called with `alive` whenever rows have left.

    Attributes:
        hidden: layer -> [T, d] (before the final norm); rows that left keep their last state.
        alive: int64 [T'], rows still running.
        exit_layer: int64 [T], last layer each row went through.
    """

    def __init__(
        self,
        layers: StoppableLayers,
        rows: int,
        hidden: Sequence[int],
        leave: Leave | None,
        last: int,
        on_leave: Callable[[Tensor], None],
    ) -> None:
        self.hidden: dict[int, Tensor] = {}
        self.alive = torch.arange(rows)
        self.exit_layer = torch.full((rows,), last, dtype=torch.int64)
        self._layers = layers
        self._rows = rows
        self._wanted = frozenset(hidden)
        self._leave = leave
        self._last = last
        self._on_leave = on_leave
        self._left: Tensor | None = None  # [T, d]: states of the rows that left
        self._handles: list[Any] = []
        for index, layer in enumerate(layers):
            if leave is not None:
                self._handles.append(
                    layer.register_forward_pre_hook(self._cut_arguments, with_kwargs=True)
                )
            if leave is not None or index in self._wanted:
                self._handles.append(layer.register_forward_hook(self._after(index)))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _cut(self, layer: nn.Module, name: str, argument: Any) -> Any:
        """An argument of a layer for the rows alive.

        Raises:
            ModelError: a tensor whose rows are not known.
        """
        if isinstance(argument, Tensor):
            dim = ROW_ARGUMENTS.get(name, -1)
            if dim < 0 or argument.shape[: dim + 1] != (1,) * dim + (self._rows,):
                raise _not_by_row(layer, f"'{name}' of {_size(argument)}")
            return argument.index_select(dim, self.alive.to(argument.device))
        if isinstance(argument, tuple | list):
            return type(argument)(self._cut(layer, name, part) for part in argument)
        if isinstance(argument, Mapping) and any(map(_holds_tensors, argument.values())):
            raise _not_by_row(layer, f"'{name}', a {type(argument).__name__} of tensors,")
        return argument

    def _cut_arguments(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if len(self.alive) == self._rows:
            return None
        # the first one, the hidden state, has only the rows alive
        first, *others = inspect.signature(layer.forward).parameters
        cut = [
            self._cut(layer, name, argument)
            for name, argument in zip(others, args[1:], strict=False)
        ]
        named = {
            name: argument if name == first else self._cut(layer, name, argument)
            for name, argument in kwargs.items()
        }
        return (*args[:1], *cut), named

    def _after(self, index: int) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(layer: nn.Module, args: Any, output: Any) -> Any:
            state = output[0] if isinstance(output, tuple) else output
            changed = state
            if self._leave is not None and index < self._last:
                if state.dim() != 3 or state.shape[0] != 1:
                    raise _not_by_row(layer, f"hidden states of {_size(state)}")
                gone = self._leave(index, state[0], self.alive)
                if gone is not None and bool(gone.any()):
                    if self._left is None:
                        self._left = state.new_zeros(self._rows, state.shape[-1])
                    rows = self.alive[gone.cpu()]
                    self._left[rows.to(state.device)] = state[0][gone]
                    self.exit_layer[rows] = index
                    self.alive = self.alive[~gone.cpu()]
                    changed = state[:, ~gone]
                    self._on_leave(self.alive)
            over = index == self._last or len(self.alive) == 0
            whole = self._whole(changed)
            for layer_index in range(index, self._last + 1) if over else (index,):
                if layer_index in self._wanted:
                    self.hidden[layer_index] = whole[0].clone()
            if over:
                self._layers.stop_after = index
                changed = whole  # the model's own norm and head see every row
            if changed is state:
                return None
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    def _whole(self, state: Tensor) -> Tensor:
        """All T rows: the running ones from `state` [1, T', d], the others as they left."""
        if self._left is None:
            return state
        whole = self._left.clone()
        whole[self.alive.to(state.device)] = state[0]
        return whole.unsqueeze(0)


def _holds_tensors(thing: Any) -> bool:
    if isinstance(thing, Mapping):
        thing = tuple(thing.values())
    if isinstance(thing, tuple | list):
        return any(map(_holds_tensors, thing))
    return isinstance(thing, Tensor)


def _size(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def _not_by_row(layer: nn.Module, what: str) -> ModelError:
    return ModelError(
        "arch-unsupported",
        f"rows cannot leave between the layers of {type(layer).__name__}: {what} may not go by row.",
        "Run all rows through all layers.",
    )


TRIAL_ROWS = 3  # of random states, on which the short way is compared with the model's own


class Unembedding:
    """The logits of a state as if the layers had ended with it.

    The model's own forward runs with the state in place of all its layers, so whatever follows them
    (norm, head, scale, soft cap) is the model's. Where the final norm and the head alone give the
    same logits, they are called directly.

    Args:
        model: a `*ForCausalLM`, weights loaded.
        layers: its layers.
    """

    def __init__(self, model: nn.Module, layers: StoppableLayers) -> None:
        self._model = model
        self._layers = layers
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._norm: nn.Module | None = None
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._is_known = False

    def __call__(self, state: Tensor, ids: Sequence[int] | None = None, *, norm: bool) -> Tensor:
        """Logits of states [n, d]; see `ModelRunner.unembed`."""
        if not self._is_known:
            self._find_norm(state)
        chosen = None if ids is None else tuple(ids)
        if norm and self._norm is None:
            logits = self._own(state)
        else:
            normed = self._norm(state[None])[0] if norm and self._norm is not None else state
            if chosen is not None and (rows := self._rows_of(chosen)) is not None:
                weight, bias = rows
                # products and sums row by row: no matrix product, which depends on the batch
                some = (normed.double()[:, None, :] * weight.double()).sum(-1)
                return (some if bias is None else some + bias.double()).float()
            logits = self._head(normed)
        return logits.float() if chosen is None else logits[:, list(chosen)].float()

    def _own(self, state: Tensor) -> Tensor:
        """The model's own way from states [n, d] to logits [n, V]."""
        count = state.shape[0]
        ids = torch.zeros(1, count, dtype=torch.int64, device=state.device)
        with self._layers.giving(state[None]):
            output = self._model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    def _find_norm(self, like: Tensor) -> None:
        """Look for a norm that, with the head, does all that the model does after its layers."""
        self._is_known = True
        generator = torch.Generator().manual_seed(0)
        trial = torch.randn(TRIAL_ROWS, like.shape[-1], generator=generator, dtype=torch.float32)
        state = (trial * like.float().std().cpu()).to(like.device, like.dtype)
        seen: list[nn.Module] = []

        def watch(module: nn.Module, args: Any) -> None:
            taken = args[0] if args else None
            if isinstance(taken, Tensor) and taken.data_ptr() == state.data_ptr():
                seen.append(module)

        inside = set(self._layers.modules())
        others = [each for each in self._model.modules() if each not in inside]
        handles = [each.register_forward_pre_hook(watch) for each in others]
        try:
            own = self._own(state)
        finally:
            for handle in handles:
                handle.remove()
        for module in seen:
            if module is self._head:
                continue
            found = self._head(module(state[None]))[0]
            if torch.equal(found.float(), own.float()):
                self._norm = module
                return

    def _rows_of(self, ids: tuple[int, ...]) -> tuple[Tensor, Tensor | None] | None:
        """Weights [k, d] and biases [k] of the head for some tokens; None where it hides them."""
        if ids not in self._rows:
            chosen, bias = list(ids), getattr(self._head, "bias", None)
            weight = self._chosen(chosen)
            if weight is None:
                return None
            self._rows[ids] = (weight, None if bias is None else bias[chosen])
        return self._rows[ids]

    def _chosen(self, ids: list[int]) -> Tensor | None:
        """Rows [k, d] of the weight of the head; None where it hides them."""
        head = self._head
        if isinstance(head, BlockLinear) and len(head.weights) == 1:
            return head.weights[0].rows(torch.tensor(ids), torch.float32)
        weight = self._weight()
        return None if weight is None else weight[ids]

    def _weight(self) -> Tensor | None:
        """The weight [V, d] of the head: its own, or of a packed one the embedding's it is tied
        to."""
        head = self._head
        if type(head) is nn.Linear or (isinstance(head, PackedLinear) and head.packing == "dense"):
            return head.weight.detach()
        tied = getattr(self._model.config, "tie_word_embeddings", False)
        if not tied or not isinstance(head, PackedLinear):
            return None
        embedding: Any = self._model.get_input_embeddings()  # type: ignore[operator]
        weight: Tensor = embedding.weight.detach()
        return weight if weight.shape == (head.out_features, head.in_features) else None
