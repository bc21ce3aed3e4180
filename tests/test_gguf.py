"""GGUF files: read once, known by their content, and refused by name where they are damaged."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import llama, write_gguf
from support.real_models import model_file

from arbor import ModelError, Solver
from arbor.model import bfloat16
from arbor.model.description_cache import (
    keep_description,
    kept_description,
)
from arbor.model.loading import load_config, load_model, load_tokenizer, locate_model
from arbor.model.weights import read_files
from arbor.run.conversation import conversation_tokens

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")
needs_load = pytest.mark.filterwarnings("ignore")  # of the packages that convert
cpu_check = bfloat16._cpu_multiplies_bfloat16
CHAT = (
    "{% for m in messages %}<bos>{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>{% endif %}"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(llama(), path, quantized=True, template=CHAT)
    return path


@pytest.fixture
def tiny(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file of its own; what is kept goes to a cache folder of its own."""
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copy(written, tmp_path / "m.gguf"))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        locate_model(path)
    assert refused.value.code == "model-incomplete"
    return str(refused.value)


# Reading


@needs_load
def test_transformers_makes_the_same_of_the_header_read_once(written: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = locate_model(written)
    place: dict[str, Any] = {"gguf_file": written.name}
    model = AutoModelForCausalLM.from_pretrained(written.parent, **place)
    config = AutoConfig.from_pretrained(written.parent, **place)
    tokenizer = AutoTokenizer.from_pretrained(written.parent, **place)

    ours = load_model(source, torch.float32, torch.device("cpu"))

    assert load_config(source).to_dict() == config.to_dict()
    read = load_tokenizer(source)
    same = [json.loads(each.backend_tokenizer.to_str()) for each in (read, tokenizer)]
    assert all(same[0][part] == same[1][part] for part in ("model", "added_tokens", "decoder"))
    assert read.special_tokens_map == tokenizer.special_tokens_map
    weights = dict(model.state_dict())
    assert weights.keys() == ours.state_dict().keys()
    assert all(torch.equal(weights[name], each) for name, each in ours.state_dict().items())


# Kept by content


def keep(path: Path) -> None:
    source = locate_model(path)
    keep_description(source, "auto", load_config(source), read(path))


def read(path: Path) -> Any:
    return read_files(locate_model(path), None, None, "auto", keep=False)


# Damaged files


@pytest.mark.parametrize("cut", [4, 23, 24, 40, 1000])
def test_a_file_cut_within_its_header_says_so(tiny: Path, cut: int) -> None:
    os.truncate(tiny, cut)

    assert f"ends at byte {cut:,}, within its header" in refusal(tiny)


@pytest.mark.parametrize(
    ("at", "bytes_", "words"),
    [
        (0, b"GGML", "four bytes GGUF"),
        (4, struct.pack("<I", 1), "version 1"),
        (8, struct.pack("<Q", 1 << 60), "announces"),
        (24, struct.pack("<Q", 1 << 62), "within its header"),
    ],
)
def test_damaged_headers_are_refused_by_name(
    tiny: Path, at: int, bytes_: bytes, words: str
) -> None:
    data = tiny.read_bytes()
    tiny.write_bytes(data[:at] + bytes_ + data[at + len(bytes_) :])

    assert words in refusal(tiny)


# Models that others trained


@needs_load
@pytest.mark.parametrize(
    "name",
    ["smollm2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen-small", "gemma"))],
)
def test_a_real_model_is_described_as_transformers_reads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path))
    path = model_file(name)
    source = locate_model(path)
    files = read(path)
    keep_description(source, "auto", load_config(source), files)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    kept = kept_description(source, "auto")

    assert kept is not None
    assert kept.info == files.info
    assert load_config(source).to_dict() == (
        AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    )
    for text in ("Target 24 (left: 4 5 6 10)\n", "  été — 東京\t\n\n#### 72 <b>", "<|im_end|>"):
        assert kept.tokenizer.encode(text) == files.tokenizer.encode(text) == theirs.encode(text)
    if theirs.chat_template:
        messages = [{"role": "user", "content": "What is 2 + 2?"}]
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert conversation_tokens(kept.tokenizer, messages) == wanted["input_ids"]


# Dtype and memory


@pytest.mark.parametrize(
    ("flags", "quantized", "dtype"),
    [
        ("flags : sse avx512_bf16", True, "bfloat16"),
        ("flags : sse amx_bf16 amx_tile", True, "bfloat16"),
        ("flags : sse avx512f", True, "float32"),
        ("flags : sse avx512_bf16", False, "float32"),
        ("", True, "float32"),
    ],
)
def test_quantized_weights_become_bfloat16_where_it_is_multiplied_natively(
    flags: str, quantized: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bfloat16, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(bfloat16, "_cpu_multiplies_bfloat16", cpu_check.__wrapped__)
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, quantized)

    with Solver(path, device="cpu") as solver:
        assert solver.describe().dtype == dtype
    with Solver(path, device="cpu", dtype="float32") as solver:
        assert solver.describe().dtype == "float32"
