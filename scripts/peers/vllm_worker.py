"""Decodes trees with vLLM on a CPU; runs in vLLM's own environment (see `bench_peers.py`).

    python vllm_worker.py MODEL_FOLDER DTYPE LENGTH

Every level re-submits the whole paths: blocks that automatic prefix caching still has are not
computed again. Of a path that ended within a block of 32 tokens, that block is.
"""

from __future__ import annotations

import os
import sys
from itertools import chain

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so its time is measured
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from serving import Decoded, serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

BLOCK = 32  # tokens


class Vllm:
    """One model in vLLM.

    Args:
        folder: of the model, in Hugging Face's format.
        dtype: of weights and KV.
        length: the most tokens of a path.
    """

    def __init__(self, folder: str, dtype: str, length: int) -> None:
        self._model = LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            block_size=BLOCK,
            max_model_len=length,
            max_num_seqs=64,
        )

    def prepare(self, prompt: list[int]) -> None:
        """Compute the prompt's KV, and nothing of another one."""
        self._model.reset_prefix_cache()
        self._generate([prompt], 1)

    def decode(self, prompt: list[int], fans: list[int], tokens: int) -> Decoded:
        """The blocks of a tree, level by level: int [blocks][tokens]."""
        paths, blocks = [prompt], []
        for fan in fans:
            begun = [[*path, 5 + child] for path in paths for child in range(fan)]
            found = self._generate(begun, tokens)
            blocks.append(found)
            paths = [path + block for path, block in zip(begun, found, strict=True)]
            paths = [path[:-1] for path in paths]  # as the others have it: see `bench_peers.py`
        return list(chain.from_iterable(blocks))

    def _generate(self, paths: list[list[int]], tokens: int) -> list[list[int]]:
        given = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=path) for path in paths]
        done = self._model.generate(prompts, given, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]


if __name__ == "__main__":
    serve(Vllm(sys.argv[1], sys.argv[2], int(sys.argv[3])))
