"""lm-eval's models under the name ``arbor``: likelihoods and continuations by arbor's engine.

    python -m arbor.integrations.lm_eval --model arbor --tasks gsm8k \\
        --model_args "pretrained=DIR,controller=tot;width=3"

The import of this module registers the model; as a program it is lm-eval's own command after that.
Needs ``arbor-search[lm-eval]``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import lm_eval.models  # noqa: F401  # lm-eval adds its own only where none is registered yet
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from arbor.errors import UsageError
from arbor.measure.evaluation.dataset import sample_seed
from arbor.model.loading import load_generation_config
from arbor.model.sampling_params import Sampling
from arbor.run.choices import PathTokens
from arbor.run.conversation import plain_decoding, stepped_search
from arbor.run.limits import check_count
from arbor.run.planning import path_and_question, path_within
from arbor.run.request import Options
from arbor.run.run import Run
from arbor.run.setup import Setup
from arbor.run.stream import SearchJob
from arbor.run.worker import SharedEngine
from arbor.solver import Solver
from arbor.tasks.plain_text import SteppedText, cut_at, plain_problem

MAX_GEN_TOKS = 256  # lm-eval's default
ANY_DEVICE = (None, "cuda", "cuda:0")  # what lm-eval asks for by default: a GPU where there is one
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# transformers' values where neither the request nor the model's generation config has one
SAMPLING: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}
ONE_TEXT = {"num_beams": 1, "num_return_sequences": 1}


class Asked(NamedTuple):
    """A continuation that is asked for.

    Attributes:
        prompt: token ids.
        ends: texts that end it.
        most: tokens of it.
        sampling: of its tokens.
    """

    prompt: tuple[int, ...]
    ends: tuple[str, ...]
    most: int
    sampling: Sampling


@register_model("arbor")
class ArborLM(TemplateLM):
    """A model of lm-eval that runs on arbor's engine.

    Tokens, windows and truncation are those of lm-eval's own ``hf`` model, so that numbers agree
    with it. Without a controller, continuations are decoded plainly; with one they are searched,
    step by step, and the best path is the continuation.

    Args:
        pretrained: a directory, a Hub id, or ``builtin:sapling``.
        controller, verifier: as in `Solver`, with ``;`` for the commas between settings.
        budget: KV of a search, as in `Solver`.
        step_tokens, max_expansions: limits of a search.
        concurrency: continuations in progress at a time.
        kv_tokens: fixed KV of all of them; by default as much as their budgets need.
        max_length: tokens of a context; by default the model's.
        max_gen_toks: tokens of a continuation where the task names no number.
        add_bos_token, prefix_token_id: as for ``hf``.
        seed: of the run; that of a continuation follows from it, the prompt's tokens, and how many
            equal requests are before it.
        device: as in `Solver`; lm-eval's default is a GPU, or the CPU where there is none.
        batch_size, max_batch_size: without effect; batches are as large as their KV.
        settings: others of `Solver`: dtype, device, backend, revision, threads, policy and so on.
    """

    def __init__(
        self,
        pretrained: str = "builtin:sapling",
        *,
        controller: str | None = None,
        verifier: str = "self",
        budget: str | float = "full",
        step_tokens: int = 128,
        max_expansions: int = 256,
        concurrency: int = 8,
        kv_tokens: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._step_tokens = check_count("step_tokens", step_tokens) or 1
        self._max_expansions = check_count("max_expansions", max_expansions)
        self._at_once = check_count("concurrency", concurrency) or 1
        self._max_gen_toks = check_count("max_gen_toks", max_gen_toks) or 1
        self._budget, self._seed = budget, seed
        self._searches = controller is not None
        self._solver = Solver(
            pretrained,
            task=SteppedText(),
            controller=(controller or "chain").replace(";", ","),
            verifier=verifier.replace(";", ",") if self._searches else "exact",
            device="auto" if device in ANY_DEVICE else device,
            record_bytes=0,
            **settings,
        )
        context = self._solver.describe().context
        self._context = min(max_length or context, context)
        self._kv_tokens = check_count("kv_tokens", kv_tokens)
        self._sampling = _sampling_of_hf(load_generation_config(self._solver.checkpoint.source))
        self._add_bos = add_bos_token
        self._prefix = prefix_token_id
        self.tokenizer = self._solver.tokenizer
        if add_bos_token is not None:
            self.tokenizer = copy.deepcopy(self.tokenizer)
            self.tokenizer.add_bos_token = add_bos_token
        self._device = self._solver.device

    # What lm-eval asks of every model

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context."""
        if self._prefix is not None:
            return self._prefix
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self._context

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Of the tokenizer, for lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text; no second prefix where it begins with one."""
        prefix = self.tokenizer.decode([self.prefix_token_id])
        return self._encoded(string, prefix, add_special_tokens)

    def _encoded(self, text: str, prefix: str | None, special: bool | None = None) -> list[int]:
        """Token ids of a text; without special ones if it begins with `prefix`, unless given."""
        if special is None:
            special = False if prefix and text.startswith(prefix) else self._add_bos
        given = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer.encode(text, **given))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # Likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = []
        for _, before, tokens in requests:
            left = max(0, len(before) + len(tokens) - 1 - self._context)
            pairs.append((before[left:], tokens))
        scores = []
        for each in self._solver.logprobs(pairs):
            if each is None:
                raise RuntimeError("the solver was stopped while it scored")
            scores.append((each.total, all(each.greedy)))
        for (key, _, _), score in zip(requests, scores, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log probability of whole texts, in windows of the context."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            (text,) = request.args
            own = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self._context,
                    context_len=1,
                )
            ]
            windows += [(None, before, tokens) for before, tokens in own]
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Continuations

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, up to the first string that ends it.

        Raises:
            ArborError: before any is begun: arguments that arbor does not have, or a context that
                needs more KV than there is. Later: the error that ended one, and with it all.
        """
        self._solver.load()
        shared = self._solver.shared(self._at_once, self._kv_tokens)
        asked = [self._asked(shared, *request.args) for request in requests]
        before: Counter[Asked] = Counter()
        runs = []
        for each in asked:
            runs.append(self._run(shared, each, before[each]))
            before[each] += 1
        jobs: list[SearchJob] = []
        texts = []
        try:
            for run in runs:
                jobs.append(shared.begin(run))
            for request, each, job in zip(requests, asked, jobs, strict=True):
                text = cut_at(self._text(job), each.ends)
                texts.append(text)
                self.cache_hook.add_partial("generate_until", request.args, text)
        finally:
            for job in jobs:
                job.abandon()
        return texts

    def _asked(self, shared: SharedEngine, context: str, arguments: dict[str, Any]) -> Asked:
        """What a request asks for; None stands for what `hf` takes.

        The context is cut on the left as `hf` cuts it, for a search further by the question about
        the longest path.

        Raises:
            UsageError: arguments that arbor does not have.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        until = given.pop("until", [])
        ends = [until] if isinstance(until, str) else list(until)
        ends.append(self.tokenizer.decode([self.eot_token_id]))
        asked = [int(given.pop(name)) for name in LENGTHS if name in given]
        most = asked[0] if asked else self._max_gen_toks
        sampled = bool(given.pop("do_sample", float(given.get("temperature", 0)) > 0))
        chosen = {name: given.pop(name) for name in SAMPLING if name in given}
        given.pop("use_cache", None)
        unknown = sorted(name for name in given if given[name] != ONE_TEXT.get(name))
        if unknown:
            raise UsageError(
                "lm-eval-argument",
                "generation arguments that arbor does not have: "
                f"{', '.join(f'{name}={given[name]!r:.40}' for name in unknown)}.",
                "Leave them out of --gen_kwargs.",
            )
        if self._searches:
            sampling = dataclasses.replace(self._solver.sampling, **(chosen if sampled else {}))
        elif sampled:
            sampling = dataclasses.replace(self._sampling, **chosen)
        else:
            sampling = Sampling(temperature=0.0)
        tokens = self._encoded(context, self.tokenizer.bos_token)
        wanted = Asked(tuple(tokens), tuple(end for end in ends if end), most, sampling)
        problem = plain_problem([self.prefix_token_id], "")

        def setup(size: int) -> Setup:
            changes = self._changes(wanted._replace(most=size))
            return dataclasses.replace(shared.setup, **changes)

        left = self._context - path_and_question(setup(max(1, most)), problem)
        if most < 1 or left < 1:
            fits = path_within(setup(self._context), problem, self._context - 1)
            judged = " and to ask about" * (self._searches and shared.setup.verifier.needs_model)
            raise UsageError(
                "lm-eval-argument",
                f"{most:,} tokens to generate{judged}, and the context has {self._context:,}.",
                f"Give max_gen_toks between 1 and {fits:,}." if fits else "Give more max_length.",
            )
        return wanted._replace(prompt=wanted.prompt[-left:])

    def _changes(self, asked: Asked) -> dict[str, Any]:
        """The fields of `Setup` that make a run continue a text."""
        if not self._searches:
            return plain_decoding(asked.ends, asked.most, asked.sampling)
        changes = stepped_search(asked.ends, asked.most, self._step_tokens, asked.sampling)
        return changes | {"max_expansions": self._max_expansions}

    def _run(self, shared: SharedEngine, asked: Asked, before: int) -> Run:
        """The search of a continuation that is asked for, after `before` equal ones."""
        problem = plain_problem(list(asked.prompt) or [self.prefix_token_id], "")
        sample = " ".join(map(str, asked.prompt)) + f"\n{before}" * bool(before)
        options: Options = {"seed": sample_seed(self._seed, sample)}
        if self._searches:
            options["budget"] = self._budget
        return shared.prepare(problem, options, **self._changes(asked))

    def _text(self, job: SearchJob) -> str:
        """The text that a search has found, its tokens decoded by themselves."""
        solution = job.solution()
        paths = PathTokens()
        while (event := job.events.get()) is not None:
            paths.feed(event)
        tokens = paths.ids(solution.path[-1]) if solution.path else []
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _sampling_of_hf(generation: Any) -> Sampling:
    """How `hf` samples: by a model's generation config, whether that samples or not, then by
    `SAMPLING`."""
    found = {name: getattr(generation, name, None) for name in SAMPLING}
    return Sampling(**{**SAMPLING, **{n: each for n, each in found.items() if each is not None}})
