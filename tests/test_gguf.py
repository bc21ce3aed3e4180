"""GGUF files: read once, known by their content, and refused by name where they are damaged."""

from __future__ import annotations

import json
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gguf_files import llama, write_gguf
from support.real_models import model_file
from support.run_cli import environment, in_process

from arbor import ModelError, Solver
from arbor.model import bfloat16, weights
from arbor.model.description_cache import (
    keep_description,
    kept_description,
    light_tokenizer,
)
from arbor.model.gguf import header as gguf_header
from arbor.model.gguf.header import GGUFHeader, read_gguf_header
from arbor.model.loading import BUILTIN, load_config, load_tokenizer, locate_model
from arbor.model.plain_tokenizer import PlainTokenizer
from arbor.model.sampling_params import Sampling
from arbor.model.weights import read_files
from arbor.run.conversation import conversation_tokens
from arbor.support.texts import human_bytes

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


# Sampling


@needs_load
@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({}, Sampling()),
        ({"temp": 0.6, "top_p": 0.95, "top_k": 20}, Sampling(0.6, 0.95, 20)),
        ({"min_p": 0.05}, Sampling(1.0, 1.0, 0, 0.05)),
        ({"temp": -1.0}, Sampling(0.0, 1.0)),
    ],
)
def test_texts_are_sampled_as_the_file_says(
    settings: dict[str, float], sampling: Sampling, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    named = {f"general.sampling.{name}": value for name, value in settings.items()}
    write_gguf(llama(), path, settings=named)

    assert Solver(model=path).setup.resolved_sampling == sampling


@needs_load
def test_sampling_that_the_file_cannot_mean_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, settings={"general.sampling.top_p": 1.5})
    with pytest.raises(ModelError, match=r"invalid sampling settings: .*top_p"):
        Solver(model=path).describe()


# Reading


def test_the_header_is_what_the_gguf_package_reads(written: Path) -> None:
    import gguf

    ours, theirs = read_gguf_header(written), gguf.GGUFReader(written)

    assert {key: ours.get(key) for key in ours} == {
        name: field.contents()
        for name, field in theirs.fields.items()
        if not name.startswith("GGUF.")
    }
    assert [
        (each.name, each.shape, each.type, each.start, each.length) for each in ours.tensors
    ] == [
        (t.name, tuple(reversed(t.shape.tolist())), t.tensor_type, t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]
    assert (ours.data_start, ours.quantized) == (theirs.data_offset, True)


def test_a_header_longer_than_the_first_read_is_read(
    written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = read_gguf_header(written)
    monkeypatch.setattr(gguf_header, "FIRST_READ", 30)
    again = read_gguf_header(Path(shutil.copy(written, tmp_path / "again.gguf")))

    assert (again.digest, again.tensors) == (whole.digest, whole.tensors)


@needs_load
def test_a_file_is_parsed_once_a_process(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    parsed: list[str] = []

    class Counted(GGUFHeader):
        def __init__(self, path: Path, *arguments: Any) -> None:
            parsed.append(path.name)
            super().__init__(path, *arguments)

    class Forbidden:
        def __init__(self, *_: Any) -> None:
            raise AssertionError("the file is parsed by the gguf package as well")

    monkeypatch.setattr(gguf_header, "GGUFHeader", Counted)
    monkeypatch.setattr(gguf, "GGUFReader", Forbidden)

    with Solver(tiny, controller="chain", verifier="exact", max_expansions=1) as solver:
        solver.plan()
        solver.solve("4 5 6 10")

    assert parsed == ["m.gguf"]
    assert gguf.GGUFReader is Forbidden


@needs_load
def test_transformers_makes_the_same_of_the_header_read_once(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, named={"<|endoftext|>": 3})  # transformers adds it where it lacks
    source = locate_model(path)
    place: dict[str, Any] = {"gguf_file": path.name}
    config = AutoConfig.from_pretrained(path.parent, **place)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **place)

    assert load_config(source).to_dict() == config.to_dict()
    read = load_tokenizer(source)
    same = [json.loads(each.backend_tokenizer.to_str()) for each in (read, tokenizer)]
    assert all(same[0][part] == same[1][part] for part in ("model", "added_tokens", "decoder"))
    assert read.special_tokens_map == tokenizer.special_tokens_map


@needs_load
def test_a_tokenizer_next_to_the_file_is_not_its_own(tiny: Path) -> None:
    before = load_tokenizer(locate_model(tiny)).encode("4 5 6 10")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN["sapling"] / name, tiny.parent / name)

    assert load_tokenizer(locate_model(tiny)).encode("4 5 6 10") == before


@pytest.mark.parametrize("name", ["model", "m.GGUF", "m.bin"])
def test_a_gguf_file_is_known_by_its_first_bytes(tiny: Path, name: str) -> None:
    found = locate_model(tiny.rename(tiny.with_name(name)))

    assert found.gguf == name


# Kept by content


def keep(path: Path) -> None:
    source = locate_model(path)
    keep_description(source, "auto", load_config(source), read(path))


def read(path: Path) -> Any:
    return read_files(locate_model(path), None, None, "auto", keep=False)


@needs_load
def test_a_kept_description_is_that_of_the_file(tiny: Path) -> None:
    files = read(tiny)
    keep(tiny)
    found = kept_description(locate_model(tiny), "auto")

    assert found is not None
    assert (found.info, found.sampling) == (files.info, files.sampling)
    assert found.tokenizer.encode("4 5 6 10 = 24") == files.tokenizer.encode("4 5 6 10 = 24")
    assert found.tokenizer.chat_template == CHAT
    assert len(found.tokenizer) == len(files.tokenizer)


@needs_load
def test_a_file_is_known_under_any_name(tiny: Path, tmp_path: Path) -> None:
    keep(tiny)
    moved = tmp_path / "elsewhere" / "other.gguf"
    moved.parent.mkdir()
    tiny.rename(moved)

    found = kept_description(locate_model(moved), "auto")

    assert found is not None and found.info.id == str(moved)


@needs_load
def test_two_models_called_the_same_share_nothing(tiny: Path, tmp_path: Path) -> None:
    keep(tiny)
    other = tmp_path / "elsewhere" / "m.gguf"
    other.parent.mkdir()
    write_gguf(llama(), other, quantized=True, settings={"llama.context_length": 128})

    assert kept_description(locate_model(other), "auto") is None


@needs_load
def test_a_replaced_file_of_equal_size_and_time_is_noticed(tiny: Path) -> None:
    keep(tiny)
    before = tiny.stat()
    data = tiny.read_bytes()
    wanted = struct.pack("<I", 256)
    at = data.index(b"llama.context_length") + len(b"llama.context_length") + 4
    assert data[at : at + 4] == wanted
    tiny.write_bytes(data[:at] + struct.pack("<I", 128) + data[at + 4 :])
    os.utime(tiny, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert (tiny.stat().st_size, tiny.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert kept_description(locate_model(tiny), "auto") is None
    assert read(tiny).info.context == 128


@needs_load
def test_a_prompt_of_a_gguf_file_keeps_its_tokenizer(tiny: Path) -> None:
    source = locate_model(tiny)

    first, second = light_tokenizer(source), light_tokenizer(source)

    assert not isinstance(first, PlainTokenizer)
    assert isinstance(second, PlainTokenizer)


@needs_load
def test_a_model_seen_before_is_loaded_with_the_tokenizer_that_was_kept(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search: dict[str, Any] = {"controller": "chain", "verifier": "exact", "max_expansions": 1}
    with Solver(tiny, step_format="regex:[0-9]+", **search) as first:
        found = first.solve("4 5 6 10")
        thoughts = [node.text for node in first.engine.tree]

    monkeypatch.setattr(weights, "load_tokenizer", lambda source: pytest.fail("read again"))
    with Solver(tiny, step_format="regex:[0-9]+", **search) as second:
        again = second.solve("4 5 6 10")

        assert [node.text for node in second.engine.tree] == thoughts
        assert isinstance(second.engine.tokenizer, PlainTokenizer)
    assert again.answer == found.answer


# Damaged files


@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
def test_a_file_cut_off_says_where(tiny: Path, part: float) -> None:
    size = tiny.stat().st_size
    cut = int(size * part)
    os.truncate(tiny, cut)

    said = refusal(tiny)

    assert f"ends at byte {cut:,} of the {size:,}" in said and "Download" in said


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


def test_an_id_beyond_the_vocabulary_names_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, settings={"tokenizer.ggml.eos_token_id": 9999})

    said = refusal(path)

    assert "tokenizer.ggml.eos_token_id" in said and "9999" in said and "640 tokens" in said
    assert "tokenizer.json" not in said


def test_a_part_of_a_split_file_says_how_to_join_it(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    write_gguf(llama(), path, settings={"split.count": 3, "split.no": 0})

    said = refusal(path)

    assert "part 1 of 3" in said and "llama-gguf-split --merge" in said


ATTENTION = b"blk.1.attn_q.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
# what is done to the bytes of a file -> words of the refusal
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "it is empty"),
    "git lfs": (lambda _: LFS, "pointer of Git LFS"),
    "web page": (lambda _: b"<!DOCTYPE html><html>", "it is a web page"),
    "zeros": (lambda data: bytes(len(data)), "begins with zeros"),
    "zip": (lambda data: b"PK" + data[2:], "four bytes GGUF"),
    "big endian": (lambda data: data[:4] + data[4:8][::-1] + data[8:], "little-endian"),
    "dimensions": (lambda data: after(data, ATTENTION, 0, "I", 9), "9 dimensions"),
    "tensor type": (lambda data: after(data, ATTENTION, 20, "I", 99), "weights of type 99"),
    "tensor far": (lambda data: after(data, ATTENTION, 24, "Q", 1 << 40), "is cut off"),
    "tensor between": (lambda data: after(data, ATTENTION, 24, "Q", 7), "no multiple of 32"),
    "huge tensor": (lambda data: after(data, ATTENTION, 12, "Q", 1 << 60), "is cut off"),
    "block": (lambda data: after(data, ATTENTION, 4, "Q", 33), "keeps 32 a block"),
    "tensor twice": (lambda data: data.replace(b"blk.1.attn_q", b"blk.0.attn_q"), "twice"),
    "name": (lambda data: data.replace(b"1.attn_q", b"1.attn\xff\xfe"), "not UTF-8"),
    "key twice": (lambda data: data.replace(b"bos_token_id", b"eos_token_id"), "twice"),
    "huge count": (lambda data: after(data, b"llama.block_count", 4, "I", 1 << 31), "tensors"),
    "setting type": (lambda data: after(data, b"llama.block_count", 0, "I", 77), "type 77"),
    "array type": (lambda data: after(data, b"ggml.merges", 4, "I", 77), "array of type 77"),
    "architecture": (lambda data: data.replace(b"l.architecture", b"l.architectura"), "not say"),
    "no tokens": (lambda data: data.replace(b"ggml.tokens", b"ggml.tokenz"), "ggml.tokens'"),
    "no merges": (lambda data: data.replace(b"ggml.merges", b"ggml.mergez"), "ggml.merges'"),
    "no tokenizer": (lambda data: data.replace(b"ggml.model", b"ggml.modex"), "ggml.model'"),
    "no context": (lambda data: data.replace(b"context_l", b"contexx_l"), "context_length'"),
    "no epsilon": (lambda data: data.replace(b"rms_eps", b"rms_epz"), "rms_epsilon'"),
    "no heads": (lambda data: after(data, b"attention.head_count", 4, "I", 0), "head_count' is 0"),
    "heads": (lambda data: after(data, b"head_count_kv", 4, "I", 3), "of its 3 KV heads"),
    "no blocks": (lambda data: after(data, b"llama.block_count", 4, "I", 0), "block_count' is 0"),
    "a block less": (lambda data: after(data, b"llama.block_count", 4, "I", 1), "'blk.1."),
    "no width": (lambda data: after(data, b"embedding_length", 4, "I", 0), "length' is 0"),
    "width": (lambda data: after(data, b"embedding_length", 4, "I", 32), "length' is 32"),
}


def after(data: bytes, name: bytes, place: int, form: str, value: int) -> bytes:
    """The bytes with a number of a setting or tensor changed, `place` bytes after its name."""
    at = data.index(name) + len(name) + place
    number = struct.pack(f"<{form}", value)
    return data[:at] + number + data[at + len(number) :]


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_is_named(tiny: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    data = tiny.read_bytes()
    tiny.write_bytes(damage(data))
    assert tiny.read_bytes() != data

    said = refusal(tiny)

    assert words in said and said.count(". ") >= 1 and "tokenizer.json" not in said, said


@needs_load
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("llama.feed_forward_length", 64, "other shapes"),
        ("llama.rope.dimension_count", 5, "dim"),
    ],
)
def test_sizes_that_contradict_the_weights_are_refused(
    tiny: Path, name: str, value: int, words: str
) -> None:
    tiny.write_bytes(after(tiny.read_bytes(), name.encode(), 4, "I", value))

    with pytest.raises(ModelError) as refused, Solver(tiny) as solver:
        solver.load()

    said = str(refused.value)
    assert refused.value.code == "model-incomplete"
    assert words in said and "above" not in said and not said.endswith(":"), said


@needs_load
def test_weights_that_are_not_numbers_are_not_the_architectures_fault(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", llama()
    model.model.norm.weight.data.fill_(torch.nan)
    write_gguf(model, path)

    with pytest.raises(ModelError) as refused, Solver(path) as solver:
        solver.load()

    assert refused.value.code == "logits-not-finite" and "weights are broken" in str(refused.value)


@needs_load
def test_a_missing_tensor_is_named_as_the_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, without="blk.1.attn_q.weight")

    with Solver(path) as solver, pytest.raises(ModelError) as refused:
        solver.load()

    assert "1 tensor" in str(refused.value) and "safetensors" not in str(refused.value)


# Models that others trained


@pytest.mark.slow
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
    ("flags", "kernels", "quantized", "dtype"),
    [
        ("flags : sse avx512_bf16", "avx512_bf16", True, "bfloat16"),
        ("flags : sse amx_bf16 amx_tile", "", True, "bfloat16"),
        ("flags : sse avx512_bf16", "avx512_bf16", False, "float32"),
        ("flags : sse avx512f", "avx512", True, "bfloat16"),
        ("flags : sse avx512f", "avx512_vnni", False, "float32"),
        ("flags : sse avx512f", "", True, "float32"),
        ("flags : sse avx2", "avx2", True, "bfloat16"),
        ("", "neon", True, "float32"),
        ("", "neon_dot", True, "bfloat16"),
        ("", "", True, "float32"),
    ],
)
def test_what_quantized_weights_meet_is_bfloat16_where_it_is_multiplied_fast(
    flags: str,
    kernels: str,
    quantized: bool,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = SimpleNamespace(name=kernels) if kernels else None
    monkeypatch.setattr(bfloat16, "native_library", lambda: library)
    monkeypatch.setattr(bfloat16, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(bfloat16, "_cpu_multiplies_bfloat16", cpu_check.__wrapped__)
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, quantized)

    with Solver(path, device="cpu") as solver:
        assert solver.describe().dtype == dtype
    with Solver(path, device="cpu", dtype="float32") as solver:
        assert solver.describe().dtype == "float32"


def test_the_plan_names_dtype_and_memory_of_the_weights(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = in_process(capsys)("solve", "4 5 6 10", "--model", str(tiny), "--dry-run")
    described = in_process(capsys)("info", str(tiny), "--dtype", "float32")

    by_codes = platform.machine() in ("x86_64", "AMD64")  # kernels that need no such products
    dtype = "bfloat16" if by_codes or bfloat16.multiplies_bfloat16("cpu") else "float32"
    size = human_bytes(sum(each.length for each in read_gguf_header(tiny).tensors))
    assert ran.out.splitlines()[0] == f"weights           {dtype}, {size}"
    assert f"memory of weights   {size}" in described.out.splitlines()


RESIDENT = """
import sys
from arbor import Solver
from arbor.kernels.linear.layers import weight_bytes

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

with Solver(sys.argv[1], dtype="bfloat16", device="cpu") as solver:
    solver.load()
    solver.checkpoint.load()
    held = weight_bytes(solver.engine.runner.model)
    print(resident() - held)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and frees through glibc")
def test_loading_leaves_the_weights_alone_in_memory(qwen_small: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(qwen_small)],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=True,
    )

    # Python, torch and transformers take 0.35 GiB, freed memory that is kept another 0.55
    assert int(done.stdout) < 0.6 * 2**30
