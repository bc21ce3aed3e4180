"""Models with random weights, engines of every setting over them, and trees of given shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gpu_stages.floors import ModelShape, TreeShape
from gpu_stages.rows import NotAvailable, needs
from random_llama import NoText
from transformers import AutoConfig, AutoModelForCausalLM

from arbor import Solver
from arbor.engine.engine import Engine
from arbor.engine.token_source import ModelSampler
from arbor.errors import UsageError
from arbor.model.fuse.parts import unfuse
from arbor.model.level_rule import LevelRule
from arbor.tree import Node, NodeState, ThoughtTree

SHARING = {"on": 0, "off": 1 << 60}  # saved key reads that make a span a level of its own
LOGIT_SIZE = 6.0  # standard deviation: a distribution about as narrow as a trained model's
AT_ONCE = 16  # leaves whose paths are filled in one forward


class Waiting(ModelSampler):
    """The model's sampler with no step ahead, as sources that are derived from it have none."""


@dataclass(frozen=True)
class Variant:
    """How the engine runs.

    Attributes:
        sharing: ``shipped``, ``on`` (every shared span is a level) or ``off`` (none is).
        graphs: the option `cuda_graphs`.
        deterministic: the setting of that name.
        statistics: attention is observed.
        unfused: norms and activations are transformers' own.
        flashinfer: attention by FlashInfer, where Triton's is the default.
        waits: no step runs ahead of the host.
        int8: KV in 8 bits.
    """

    sharing: str = "shipped"
    graphs: bool = False
    deterministic: bool = False
    statistics: bool = False
    unfused: bool = False
    flashinfer: bool = False
    waits: bool = False
    int8: bool = False

    @property
    def name(self) -> str:
        """``shipped+graphs``."""
        words = (
            *("graphs", "deterministic", "statistics", "unfused"),
            *("flashinfer", "waits", "int8"),
        )
        return "+".join([self.sharing, *(word for word in words if getattr(self, word))])


def random_model(shape: ModelShape, device: torch.device, layers: int | None = None) -> Any:
    """A model of a shape in bfloat16; the same weights for the same shape and device."""
    torch.manual_seed(0)
    settings = {**shape.config, "num_hidden_layers": layers or shape.layers}
    config = AutoConfig.for_model(shape.model_type, **settings)
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    assert model.dtype == torch.bfloat16 and model.device.type == device.type
    head = model.get_output_embeddings().weight
    with torch.no_grad():  # the last norm gives numbers of size 1
        head.mul_(LOGIT_SIZE / (float(head[:1000].float().std()) * shape.hidden**0.5))
    return model.eval()


def make_engine(
    model: Any,
    variant: Variant,
    backend: str = "auto",
    policy: str = "full",
    debug: bool = False,
) -> Engine:
    """An engine as `Solver` makes it, over a ready model, with a variant's settings.

    Args:
        model: is changed in place.
        variant: of the engine.
        backend, policy, debug: see `Solver`; statistics need a policy that reads them.

    Raises:
        NotAvailable: not on this device.
    """
    if variant.deterministic:
        backend = "auto"
    elif variant.flashinfer:
        backend = "flashinfer"
    if backend == "flashinfer":
        needs(backend)
    try:
        solver = Solver(
            model,
            tokenizer=NoText(),
            backend=backend,
            deterministic=variant.deterministic,
            policy="h2o" if variant.statistics else policy,
            debug=debug,
            cuda_graphs=variant.graphs,
            kv_dtype="int8" if variant.int8 else "auto",
        )
    except UsageError as error:
        if variant.deterministic:
            raise NotAvailable(str(error)) from error
        raise
    engine = solver.engine
    if variant.waits:
        engine._source.__class__ = Waiting
    if variant.sharing in SHARING:
        engine.levels = LevelRule(SHARING[variant.sharing])
    if variant.unfused:
        unfuse(model)  # no graph is captured yet
    return engine


def captured(engine: Engine) -> int | None:
    """Graphs that an engine has captured; None without graphs."""
    graphs = engine.runner.graphs
    return None if graphs is None else len(graphs.buckets)


def backend_name(engine: Engine) -> str:
    """The name of an engine's attention backend: that of its class, where there is no other."""
    known = {
        "FlashInferCascade": "flashinfer",
        "TorchCascade": "torch",
        "TritonTree": "triton",
    }
    name = type(engine.runner.backend).__name__
    return known.get(name, name)


def token(place: int, vocabulary: int) -> int:
    """A token id for a place of a tree."""
    return (place * 7919) % (vocabulary - 10) + 5


def plant(
    engine: Engine, shape: TreeShape, leaves: int, own: int, grow: int, vocabulary: int, **run: Any
) -> list[Node]:
    """Open a full tree's first leaves and compute their KV; the last blocks are still growing.

    Args:
        engine: holds the tree afterwards.
        shape: of the tree.
        leaves: how many.
        own: tokens that each last block has.
        grow: tokens that there is room for after them.
        vocabulary: of the model.
        run: arguments of `Engine.open`.

    Returns:
        open children of the leaves, each with a first token that is given.
    """
    tree = ThoughtTree([token(place, vocabulary) for place in range(shape.prompt)])
    slots = shape.unique_tokens(leaves) + leaves * (grow + 4) + 64
    engine.finish()  # the tree before
    engine.open(tree, slots, **run)
    engine.extend(tree.root)
    level = [tree.root]
    for depth in range(shape.depth):
        spread = shape.branching ** (shape.depth - depth - 1)
        wanted = -(-leaves // spread)  # blocks on this level
        length = own if depth == shape.depth - 1 else shape.block
        parents = [parent for parent in level for _ in range(shape.branching)][:wanted]
        level = [block(tree, parent, length, vocabulary) for parent in parents]
    for first in range(0, leaves, AT_ONCE):
        some = level[first : first + AT_ONCE]
        engine.ask(some, [[5]] * len(some))
    children = [tree.fork(leaf) for leaf in level]
    for child in children:
        tree.append(child, token(child.id, vocabulary))
    return children


def block(tree: ThoughtTree, parent: Node, length: int, vocabulary: int) -> Node:
    """A closed block of given tokens without KV."""
    node = tree.fork(parent)
    for place in range(length):
        tree.append(node, token(131 * node.id + place, vocabulary))
    node.state = NodeState.CLOSED
    return node
