"""RewardEngine: a reward model with an engine and a KV budget of its own, shared by searches."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from arbor.budget import Budget, Footprint, Plan
from arbor.engine.engine import Engine
from arbor.errors import BudgetInfeasible, InputError, ModelError, UsageError, logits_not_finite
from arbor.events import Listener
from arbor.model.known_tokens import check_known
from arbor.model.loading import load_config
from arbor.model.model_info import ModelInfo
from arbor.model.plan import usual_levels
from arbor.model.scoring import ScoreCheckpoint, label_count, no_head
from arbor.registry import name_of
from arbor.retention.policy import POLICIES
from arbor.support.texts import one_line
from arbor.tasks.base import Problem, Task
from arbor.verifiers.base import Placement, SearchShape
from arbor.verifiers.reward.format import (
    PROCESS,
    REPLY,
    RewardFormat,
    RewardSettings,
    process_family,
)
from arbor.verifiers.reward.mirror import Mirror
from arbor.verifiers.self_eval import CERTAIN

if TYPE_CHECKING:
    from torch import Tensor


def values_of(scores: Tensor, label: int | None) -> list[float]:
    """The probability that a step is good, in [0, `CERTAIN`].

    Args:
        scores: [n, labels] float32.
        label: of a good step; None: the second of two, the only one of one. A single label is the
            logit of a probability, several are those of a distribution.

    Raises:
        ModelError: the scores are not finite.
    """
    import torch

    logits = scores.double().cpu()
    if logits.shape[1] == 1:
        probabilities = torch.sigmoid(logits[:, 0])
    else:
        probabilities = torch.softmax(logits, dim=1)[:, 1 if label is None else label]
    if not bool(probabilities.isfinite().all()):
        raise logits_not_finite()
    return [min(value, CERTAIN) for value in probabilities.tolist()]


# A step may have more tokens here than in the search's model: planned by the prompt, with a margin.
MARGIN = 1.25
PLACE = re.compile(r"\{(prompt|problem)\}")
ANCHOR = "\n"  # never joined to what follows by tokenizers that put a space before every text


class RewardEngine:
    """A reward model, loaded once for all searches of a solver.

    Its trees mirror those of the searches: a block for each of theirs, with the same text in the
    reward model's tokens. So the KV of a path is computed once here too, and evicted and computed
    again within a budget of its own, lossless.

    Args:
        verifier: the settings.
        placement: where it runs.

    Raises:
        ModelError: the model does not exist.
        UsageError: a device or backend that cannot be used.
    """

    def __init__(self, verifier: RewardSettings, placement: Placement) -> None:
        self.verifier = verifier
        self.name = name_of(verifier)
        self.budget = Budget.parse(verifier.budget)
        self._debug = placement.debug
        self._checkpoint = ScoreCheckpoint(
            verifier.model,
            revision=verifier.revision,
            dtype=verifier.dtype,
            device=placement.device,
            backend=placement.backend,
            deterministic=placement.deterministic,
        )
        self._engine: Engine | None = None

    # Life

    def describe(self) -> ModelInfo:
        return self._checkpoint.read().info

    def load(self) -> Engine:
        """The engine; loads the weights.

        Raises:
            ModelError, UsageError: not a reward model of this format.
        """
        if self._engine is None:
            self._checkpoint.tokens = self._tags
            runner = self._checkpoint.load().runner
            self._engine = Engine(
                runner,
                self.tokenizer,
                policy=POLICIES["reentry"],
                levels=usual_levels(runner.device, runner.backend),
                debug=self._debug,
            )
        return self._engine

    def close(self) -> None:
        """Free the weights and the KV."""
        self._engine = None
        self._checkpoint.close()

    # The format

    @property
    def tokenizer(self) -> Any:
        """The reward model's Hugging Face tokenizer."""
        return self._checkpoint.read_files().tokenizer

    @cached_property
    def format(self) -> RewardFormat:
        """How the model reads and scores, checked against its tokenizer and its score head.

        Raises:
            ModelError: no score head, or one of the wrong shape.
            UsageError: the vocabulary lacks a tag, or the tokenizer a chat template.
        """
        family = self.verifier.family
        if family == "auto" and self._is_outcome:
            family = "chat" if getattr(self.tokenizer, "chat_template", None) else "text"
        elif family == "auto":
            named = getattr(load_config(self._checkpoint.source), "architectures", None) or [""]
            family = process_family(str(named[0]))
            if family == "math-shepherd" and self.verifier.head == "classes":
                family = "trl"
        found = self.verifier.format(family)
        if found.chat and not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(
                "reward-chat",
                f"{self._label}: the tokenizer has no chat template.",
                "Use chat=off, with the text of a problem as prompt=….",
            )
        if found.head == "classes":
            self._check_head(found)
        if found.one_token:
            self._token(found.separator, "separator")
        return found

    def _check_head(self, found: RewardFormat) -> None:
        source = self._checkpoint.source
        labels = label_count(source)
        if labels is None:
            raise no_head(source)
        if found.label is None and labels > 2:
            raise ModelError(
                "reward-head",
                f"{self._label}: the score head has {labels} labels, and none is known to be that of a "
                "good step.",
                f"Name it: label=0 to label={labels - 1}.",
                model=source.name,
                labels=labels,
            )
        if found.label is not None and found.label >= labels:
            raise ModelError(
                "reward-head",
                f"{self._label}: label={found.label}, and the score head has {labels}.",
                f"Use label=0 to label={labels - 1}, or leave it out.",
                model=source.name,
                labels=labels,
            )

    @property
    def _is_outcome(self) -> bool:
        """Whether a path has one score."""
        return self.verifier.path_value is None

    @property
    def _label(self) -> str:
        return f"the reward model {self._checkpoint.source.label}"

    @property
    def _tags(self) -> tuple[int, int] | None:
        """The tokens for a good and a bad step; None with a score head."""
        found = self.format
        if found.head == "classes":
            return None
        for side, text in (("good", found.good), ("bad", found.bad)):
            if not text:
                raise UsageError(
                    "reward-tags",
                    f"{self._label}: head=tags needs a token for a {side} step.",
                    f"As in good=+,bad=- (now {side} is empty).",
                )
        good = self._token(found.good, "good")
        bad = self._token(found.bad, "bad")
        if good == bad:
            raise UsageError(
                "reward-tags",
                f"{self._label}: good and bad steps have the same token, {found.good!r}.",
                "Name two tokens, as in good=+,bad=-.",
            )
        return good, bad

    def _token(self, text: str, setting: str) -> int:
        """The one token of a tag.

        Raises:
            UsageError: the vocabulary has no such token.
        """
        ids = self.encode(text)
        if len(ids) != 1 or ids[0] == getattr(self.tokenizer, "unk_token_id", None):
            raise UsageError(
                "reward-tags",
                f"{self._label}: its vocabulary has no token for the {setting} {text!r} "
                f"({len(ids)} tokens).",
                f"Name the tag that it was trained with, {setting}=…, or another family of "
                f"{', '.join(PROCESS)}.",
                setting=setting,
                tag=text,
            )
        return ids[0]

    # Tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation: no special tokens, and no space that the tokenizer would put
        before every text."""
        encode = self.tokenizer.encode
        if not self._puts_space_first:
            return list(encode(text, add_special_tokens=False))
        anchor = list(encode(ANCHOR, add_special_tokens=False))
        whole = list(encode(ANCHOR + text, add_special_tokens=False))
        if whole[: len(anchor)] == anchor:
            return whole[len(anchor) :]
        return list(encode(text, add_special_tokens=False))

    @cached_property
    def _puts_space_first(self) -> bool:
        """Whether the tokenizer puts a space before every text, as SentencePiece does."""
        ids = self.tokenizer.encode("a", add_special_tokens=False)
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        return bool(tokens) and str(tokens[0]).startswith("\N{LOWER ONE EIGHTH BLOCK}")

    def prefix(self, task: Task, problem: Problem) -> tuple[list[int], list[int]]:
        """Token ids before the first step, and those at whose end a path is scored (none: at the
        end of its last step)."""
        found = self.format
        texts = {"prompt": task.prompt(problem), "problem": problem.text}
        prompt = PLACE.sub(lambda place: texts[place[1]], found.prompt)
        end = found.end or ""
        if found.chat:
            messages = [{"role": "system", "content": found.system}] if found.system else []
            messages.append({"role": "user", "content": prompt})
            messages.append({"role": "assistant", "content": REPLY})
            text = self._chat(messages)
            before, reply, after = text.rpartition(REPLY)
            if not reply:
                raise UsageError(
                    "reward-chat",
                    f"{self._label}: its chat template leaves out the assistant's message.",
                    "Use chat=off, with the text of a problem as prompt=….",
                )
            ids = list(self.tokenizer.encode(before, add_special_tokens=False))
            end = after if found.end is None else end
        else:
            ids = list(self.tokenizer.encode(prompt))
        self._check_known(ids)
        return ids, self.encode(end) if self._is_outcome else []

    def _chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages as the chat template writes them.

        Raises:
            UsageError: it does not parse, or refuses them.
        """
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # the template's own
            without = "system='', or " if messages[0]["role"] == "system" else ""
            raise UsageError(
                "reward-chat",
                f"{self._label}: its chat template fails: {one_line(str(error)).rstrip('.')}.",
                f"Use {without}chat=off, with the text of a problem as prompt=….",
            ) from error

    def step_tokens(self, text: str, *, first: bool) -> list[int]:
        """Token ids of a step with its separator, each part by itself.

        Args:
            text: as the search's model wrote it; a process reward model reads it without the white
                space around it.
            first: the step is the first of its path.
        """
        found = self.format
        step = text if self._is_outcome else text.strip()
        tokens = self.encode((found.first if first else found.between) + step)
        self._check_known(tokens)
        return tokens + (self.encode(found.separator) if found.separator else [])

    def _check_known(self, tokens: list[int]) -> None:
        what = f"{self._label}: the path that it reads"
        check_known(tokens, self.describe().vocabulary, what, self.tokenizer)

    # Searches

    def plan(self, search: SearchShape) -> Plan:
        """The memory of a search; reads config and tokenizer.

        The length of a step is not known before it is written: it is taken to have as many more
        tokens than in the search's model as the prompt has, and a quarter more.

        Raises:
            ModelError, UsageError: not a reward model of this format.
            InputError: a path may be longer than the reward model's context.
            BudgetInfeasible: the budget is too small; names the smallest that works.
        """
        info = self.describe()
        if not info.supported:
            raise ModelError("arch-unsupported", f"{info.id}: {info.reason}", "See 'arbor info'.")
        _ = self._tags
        ids, end = self.prefix(search.task, search.problem)
        prompt = self.encode(search.task.prompt(search.problem))
        growth = MARGIN * max(1.0, len(prompt) / max(1, search.prompt_tokens))
        found = self.format
        before = max(len(self.encode(text)) for text in (found.first, found.between))
        frame = before + len(self.encode(found.separator))
        step = math.ceil(growth * search.boundary.max_tokens) + frame
        shape = Footprint(
            len(ids),
            step,
            search.boundary.max_depth,
            search.blocks,
            len(end),
        )
        if shape.path_tokens > info.context:
            raise InputError(
                "problem-too-long",
                f"a path may have {shape.path_tokens:,} tokens of {self._label}, whose context is "
                f"{info.context:,}.",
                f"{', or '.join(['Shorten the problem', *shape.levers(info.context)])}.",
                tokens=shape.path_tokens,
                context=info.context,
            )
        try:
            return self.budget.plan(shape, info.kv_bytes_per_token)
        except BudgetInfeasible as error:
            raise self._infeasible(error) from error

    def _infeasible(self, error: BudgetInfeasible) -> BudgetInfeasible:
        needed = error.needed
        return BudgetInfeasible(
            needed,
            error.budget,
            f"one path in {self._label}",
            f"Smallest workable: budget={needed}tok of the verifier '{self.name}'.",
        )

    def open(self, search: SearchShape, plan: Plan, pool: int, emit: Listener) -> Mirror:
        """Begin a search, next to those in progress, see `VerifierModel.open`."""
        ids, end = self.prefix(search.task, search.problem)
        return Mirror(
            self.load(),
            ids,
            end,
            self.step_tokens,
            self.values,
            self.verifier.path_value or "last",
            context=self.describe().context,
            plan=plan,
            pool=pool,
            verifier=self.name,
            emit=emit,
            explain=self._infeasible,
        )

    def values(self, scores: Tensor) -> Sequence[float]:
        """Scores of the model, [n, labels], as values in [0, 1].

        Raises:
            ModelError: not finite.
        """
        found = self.format
        return values_of(scores, 0 if found.head == "tags" else found.label)
