"""Other checkpoints: quantized weights, GGUF files, adapters; each loads, or is refused by name."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import LAYERS, llama, write_gguf
from torch import Tensor, nn

from arbor import ModelError, Solver, UsageError
from arbor.kernels.linear.blocks import BlockLinear
from arbor.kernels.linear.layers import PackedLinear, batch_dependent, is_plain, pack_linears
from arbor.model import adapters, quantized
from arbor.model.loading import BUILTIN, locate_model
from arbor.model.model_identity import model_identity
from arbor.model.quantized import check_quantized, quantization_of

BEFORE, AFTER = [1, 40, 77, 301, 12, 9, 500, 33], [14, 222, 8, 61]
OPENED: dict[str, Any] = {"controller": "chain,samples=2", "verifier": "exact", "max_expansions": 2}
needs_load = pytest.mark.filterwarnings("ignore")  # of the packages that quantize


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN["sapling"] / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "plain"
    llama().save_pretrained(folder)
    return with_tokenizer(folder)


def own_logprobs(model: Any) -> list[float]:
    """Of `AFTER` after `BEFORE`, by the model's own forward."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*BEFORE, *AFTER]])).logits[0].float()
    chosen = logits.log_softmax(-1)[len(BEFORE) - 1 : -1]
    return [float(row[token]) for row, token in zip(chosen, AFTER, strict=True)]


def logprobs(solver: Solver) -> list[float]:
    (found,) = solver.logprobs([(BEFORE, AFTER)])
    return list(found.logprobs)


def linears(solver: Solver) -> dict[str, nn.Module]:
    """The projections of the loaded model."""
    model = solver.engine.runner.model
    return {name: each for name, each in model.named_modules() if name.endswith("_proj")}


# Quantized weights


def saved(plain: Path, folder: Path, quantization: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=quantization, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(folder)


def bitsandbytes(bits: int) -> Callable[[Path, Path], None]:
    def make(plain: Path, folder: Path) -> None:
        from transformers import BitsAndBytesConfig

        settings = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
        saved(plain, folder, settings)

    return make


def torchao(plain: Path, folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    saved(plain, folder, TorchAoConfig(Int8WeightOnlyConfig()))


def written(
    plain: Path, folder: Path, about: dict[str, Any] | None, change: Callable[[str, Tensor], Any]
) -> None:
    """A checkpoint whose projections are changed tensors, as published ones are."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        tensors |= change(name, weight) if "_proj" in name else {name: weight}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    if about is not None:
        config["quantization_config"] = about
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def fp8(plain: Path, folder: Path) -> None:
    size = 32
    largest = torch.finfo(torch.float8_e4m3fn).max

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        blocks = weight.view(rows // size, size, columns // size, size)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / largest
        codes = (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scale[:, 0, :, 0].contiguous()}

    about = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    written(plain, folder, about | {"weight_block_size": [size, size]}, change)


def compressed(plain: Path, folder: Path) -> None:
    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        codes = (weight / scale).round().to(torch.int8)
        return {name: codes, f"{name}_scale": scale.contiguous()}

    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = {**numbers, "strategy": "channel"}
    inputs = {**numbers, "strategy": "token", "dynamic": True}
    about = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }
    written(plain, folder, about, change)


def four_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes in 0..15 with 8 for zero, [in, out], and the scale of each group, [in / group, out]."""
    columns = weight.t().contiguous()
    groups = columns.view(-1, group, columns.shape[1])
    scale = groups.abs().amax(1) / 7
    codes = (groups / scale[:, None]).round() + 8
    return codes.view_as(columns).to(torch.int32), scale.half()


def in_words(codes: Tensor, order: Sequence[int], dim: int) -> Tensor:
    """Eight codes along a dimension in each int32, the first of `order` in the lowest bits."""
    parts = codes.long().unflatten(dim, (-1, 8)).movedim(dim + 1, 0)
    whole = sum(parts[place] << (4 * bits) for bits, place in enumerate(order))
    assert isinstance(whole, Tensor)
    return (whole - ((whole >> 31) << 32)).to(torch.int32)


GROUP = 32


def gptq(plain: Path, folder: Path) -> None:
    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        base = name.removesuffix("weight")
        codes, scale = four_bits(weight, GROUP)
        zeros = torch.full_like(scale, 7, dtype=torch.int32)  # the format stores one less
        return {
            f"{base}qweight": in_words(codes, range(8), 0),
            f"{base}qzeros": in_words(zeros, range(8), 1),
            f"{base}scales": scale,
            f"{base}g_idx": torch.arange(len(codes), dtype=torch.int32) // GROUP,
        }

    about = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    written(plain, folder, about, change)


def awq(plain: Path, folder: Path) -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        base = name.removesuffix("weight")
        codes, scale = four_bits(weight, GROUP)
        return {
            f"{base}qweight": in_words(codes, order, 1),
            f"{base}qzeros": in_words(torch.full_like(scale, 8, dtype=torch.int32), order, 1),
            f"{base}scales": scale,
        }

    about = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    written(plain, folder, about | {"zero_point": True}, change)


KINDS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "bitsandbytes-8": ("bitsandbytes", bitsandbytes(8)),
    "bitsandbytes-4": ("bitsandbytes", bitsandbytes(4)),
    "torchao": ("torchao", torchao),
    "fp8": ("accelerate", fp8),
    "compressed-tensors": ("compressed_tensors", compressed),
    "gptq": ("gptqmodel", gptq),
    "awq": ("gptqmodel", awq),
}


@needs_load
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_checkpoint_computes_what_transformers_computes(
    kind: str, plain: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    package, make = KINDS[kind]
    pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path / "quantized"
    make(plain, folder)
    with_tokenizer(folder)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    with Solver(folder, dtype="float32", **OPENED) as solver:
        found = logprobs(solver)
        solution = solver.solve("4 5 6 10")
        layers = linears(solver)
        dense = logprobs_of(plain)

    assert found == pytest.approx(own_logprobs(own), abs=2e-3)
    assert found != pytest.approx(dense, abs=1e-4), "the quantized weights are used"
    assert solution.metrics.blocks == 2
    assert len(layers) == 7 * LAYERS
    packed = [name for name, each in layers.items() if isinstance(each, PackedLinear)]
    if kind == "fp8":  # on a CPU transformers makes them dense
        assert len(packed) in (0, len(layers))
    else:
        assert not packed, "quantized layers are left alone"


def logprobs_of(folder: Path) -> list[float]:
    with Solver(folder, **OPENED) as solver:
        return logprobs(solver)


class Scaled(nn.Linear):
    """Like a quantized layer: a linear layer with a forward of its own."""


def quantized_layers() -> list[nn.Module]:
    scaled = nn.Linear(4, 4)
    scaled.register_buffer("weight_scale", torch.ones(4, 1))
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    codes = nn.Linear(4, 4)
    codes.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    half = nn.Linear(4, 4)
    half.weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    return [Scaled(4, 4), scaled, patched, codes, half]


@pytest.mark.parametrize("layer", quantized_layers(), ids=["class", "scale", "own", "int8", "fp8"])
def test_layers_that_are_not_plain_are_neither_packed_nor_independent(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Linear(4, 4))

    pack_linears(model)

    assert model[0] is layer and not is_plain(layer)
    assert list(batch_dependent(model)) == ["0"]


class Config:
    def __init__(self, method: str | None, **others: Any) -> None:
        if method is not None:
            self.quantization_config = {"quant_method": method, **others}

    def get_text_config(self) -> Any:
        return self


@pytest.mark.parametrize(
    ("method", "missing", "words"),
    [
        ("gptq", ("gptqmodel",), "pip install gptqmodel"),
        ("bitsandbytes", ("bitsandbytes", "accelerate"), "pip install bitsandbytes accelerate"),
        ("quanto", ("optimum.quanto",), "pip install optimum-quanto"),
        ("hqq", (), "GPU only"),
    ],
)
def test_quantized_weights_that_cannot_be_loaded_here_are_refused_by_name(
    method: str, missing: Sequence[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "_is_installed", lambda name: name not in missing)

    with pytest.raises(ModelError, match=words) as refused:
        check_quantized(Config(method), "my-model", "cpu")

    assert method in refused.value.message and refused.value.code == "model-quantized"


@pytest.mark.parametrize("method", ["modelopt", "exl2", "marlin", ""])
def test_a_quantization_that_transformers_does_not_load_is_refused(method: str) -> None:
    with pytest.raises(ModelError, match="not quantized, or a GGUF file") as refused:
        check_quantized(Config(method), "my-model", "cuda")

    assert refused.value.code == "model-quantized"
    assert (method or "names no quant_method") in refused.value.message


@pytest.mark.parametrize("method", ["auto-round", "mxfp4", "gguf"])
def test_other_quantizations_of_transformers_are_left_to_it(method: str) -> None:
    check_quantized(Config(method), "my-model", "cpu")


def test_the_first_configs_of_bitsandbytes_name_no_method() -> None:
    assert quantization_of(Config("", load_in_8bit=True)) == "bitsandbytes"
    assert quantization_of(Config("", load_in_4bit=True)) == "bitsandbytes"


@needs_load
@pytest.mark.parametrize("about", [None, {"quant_method": "modelopt"}], ids=["untold", "told"])
def test_weights_are_not_read_without_their_scales(
    about: dict[str, Any] | None, plain: Path, tmp_path: Path
) -> None:
    def scaled(name: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}

    folder = tmp_path / "scaled"
    written(plain, folder, about, scaled)

    with (
        Solver(with_tokenizer(folder), device="cpu") as solver,
        pytest.raises(ModelError, match=r"weight_scale|modelopt") as refused,
    ):
        logprobs(solver)

    assert refused.value.code == "model-quantized"


@needs_load
def test_weights_that_are_not_in_the_form_of_their_quantization_are_refused_by_its_name(
    plain: Path, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="bitnet needs it")
    folder = tmp_path / "dense"
    written(plain, folder, {"quant_method": "bitnet"}, lambda name, weight: {name: weight})

    with (
        Solver(with_tokenizer(folder), device="cpu") as solver,
        pytest.raises(ModelError, match="other shapes than those quantized by bitnet have"),
    ):
        logprobs(solver)


# GGUF files


@needs_load
@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True], ids=["F32", "Q8_0"])
def test_a_gguf_file_is_a_model(quantized: bool, plain: Path, tmp_path: Path) -> None:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="the extra `gguf` is not installed")
    path = tmp_path / "tiny.gguf"
    write_gguf(llama(), path, quantized)

    with Solver(path, **OPENED) as solver:
        found = logprobs(solver)
        solution = solver.solve("4 5 6 10")
        info = solver.describe()
        kind = BlockLinear if quantized else PackedLinear
        assert all(isinstance(each, kind) for each in linears(solver).values())

    wanted = logprobs_of(plain)
    assert found == pytest.approx(wanted, abs=0.05 if quantized else 1e-4)
    assert quantized == (found != pytest.approx(wanted, abs=1e-4))
    assert (info.layers, info.vocabulary, info.supported) == (LAYERS, 640, True)
    assert solution.metrics.blocks == 2


# Adapters


@pytest.fixture
def adapter(tmp_path: Path, plain: Path) -> Path:
    pytest.importorskip("peft", reason="the extra `adapters` is not installed")
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


@needs_load
@pytest.mark.slow
def test_an_adapter_is_merged(plain: Path, adapter: Path) -> None:
    from peft import PeftModel

    own = own_logprobs(PeftModel.from_pretrained(llama(), adapter).eval())

    with Solver(plain, adapter=adapter, **OPENED) as solver:
        found = logprobs(solver)
        config = solver.config
        assert all(isinstance(each, PackedLinear) for each in linears(solver).values())
    again = Solver.from_config(config)

    assert found == pytest.approx(own, abs=1e-4)
    assert found != pytest.approx(logprobs_of(plain), abs=1e-2)
    assert again.config == config and config["adapter"] == str(adapter)
    with_adapter, without = locate_model(plain, adapter=adapter), locate_model(plain)
    assert model_identity(with_adapter) != model_identity(without)


@needs_load
@pytest.mark.slow
@pytest.mark.parametrize("ends", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_an_adapter_of_one_end_leaves_the_tied_other_as_it_was(
    tmp_path: Path, ends: list[str]
) -> None:
    pytest.importorskip("peft", reason="the extra `adapters` is not installed")
    from peft import LoraConfig, PeftModel, get_peft_model

    folder, lora = tmp_path / "tied", tmp_path / "lora"
    llama(tie_word_embeddings=True).save_pretrained(folder)
    model = get_peft_model(
        llama(tie_word_embeddings=True), LoraConfig(r=4, target_modules=["q_proj", *ends])
    )
    for name, weight in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.2)
    model.save_pretrained(lora)
    own = own_logprobs(PeftModel.from_pretrained(llama(tie_word_embeddings=True), lora).eval())

    with Solver(with_tokenizer(folder), adapter=lora, **OPENED) as solver:
        assert logprobs(solver) == pytest.approx(own, abs=1e-4)
        untied = solver.engine.runner.model.get_input_embeddings().weight.clone()
        solver.update_weights({"lm_head.weight": torch.zeros_like(untied)})
        assert logprobs(solver) != pytest.approx(own, abs=1e-2)
        assert torch.equal(solver.engine.runner.model.get_input_embeddings().weight, untied)


@needs_load
@pytest.mark.slow
def test_an_adapter_with_an_embedding_of_its_own_keeps_the_head_tied_if_it_says_so(
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft", reason="the extra `adapters` is not installed")
    from peft import LoraConfig, PeftModel, get_peft_model

    folder, lora = tmp_path / "tied", tmp_path / "lora"
    llama(tie_word_embeddings=True).save_pretrained(folder)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(llama(tie_word_embeddings=True), config)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.2)
    model.save_pretrained(lora)
    own = own_logprobs(PeftModel.from_pretrained(llama(tie_word_embeddings=True), lora).eval())

    with Solver(with_tokenizer(folder), adapter=lora, **OPENED) as solver:
        assert logprobs(solver) == pytest.approx(own, abs=1e-4)
    assert own != pytest.approx(logprobs_of(folder), abs=1e-2)


UNFIT: dict[str, tuple[Callable[[str], str], str]] = {
    "a layer is missing": (
        lambda name: "" if "layers.1." in name else name,
        r"lacks 6 .*layers\.1\.",
    ),
    "nothing is there": (lambda name: "", "lacks"),
    "other names": (lambda name: name.replace("model.layers", "language_model.layers"), "lacks"),
    "more layers": (lambda name: name.replace("layers.0.", "layers.7."), "lacks 6"),
}


@needs_load
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*UNFIT, "of a model with more layers"])
def test_an_adapter_with_other_weights_than_the_model_takes_is_refused(
    plain: Path, adapter: Path, kind: str
) -> None:
    from safetensors.torch import load_file, save_file

    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    if kind in UNFIT:
        renamed, words = UNFIT[kind]
        save_file({renamed(name): each for name, each in tensors.items() if renamed(name)}, path)
    else:
        more = {
            name.replace("layers.0.", "layers.7."): each.clone() for name, each in tensors.items()
        }
        save_file(tensors | more, path)
        words = r"has 6 weights .* no place for, among them .*layers\.7\."

    with pytest.raises(ModelError, match=words) as error:
        Solver(plain, adapter=adapter, **OPENED).load()

    assert error.value.code == "adapter-unreadable"


@needs_load
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words", "hint"),
    [
        ({"r": 8}, r"size mismatch for .*lora_A.* torch\.Size\(\[4, ", "that it was trained on"),
        ({"lora_bias": True}, r"cannot be merged into the weights: .*lora_bias", "safe_merge=True"),
    ],
    ids=["shapes", "merge"],
)
def test_an_adapter_that_peft_refuses_is_refused_with_its_reason(
    plain: Path, adapter: Path, settings: dict[str, Any], words: str, hint: str
) -> None:
    from safetensors.torch import load_file, save_file

    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text("utf-8")) | settings
    path.write_text(json.dumps(config), encoding="utf-8")
    if "lora_bias" in settings:
        tensors = load_file(adapter / "adapter_model.safetensors")
        biases = {
            name.replace(".weight", ".bias"): torch.zeros(len(each), dtype=each.dtype)
            for name, each in tensors.items()
            if "lora_B" in name
        }
        save_file(tensors | biases, adapter / "adapter_model.safetensors")

    with pytest.raises(ModelError, match=words) as error:
        Solver(plain, adapter=adapter, **OPENED).load()

    assert error.value.code == "adapter-unreadable"
    assert hint in (error.value.hint or "")


@needs_load
@pytest.mark.slow
def test_an_adapter_is_merged_into_a_gguf_file_in_memory_alone(
    plain: Path, adapter: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    own = own_logprobs(PeftModel.from_pretrained(llama(), adapter).eval())
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path)
    before = path.read_bytes()

    with Solver(path, adapter=adapter, **OPENED) as solver:
        found = logprobs(solver)
        info = solver.describe()

    assert found == pytest.approx(own, abs=1e-4)
    assert info.weights_bytes == 4 * info.parameters
    assert path.read_bytes() == before


def test_other_folders_than_adapters_are_refused_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "adapter_config.json"

    with pytest.raises(UsageError, match=r"no adapter_config\.json"):
        Solver(adapter=tmp_path)
    config.write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not a peft config"):
        Solver(adapter=tmp_path)
    config.write_text('{"peft_type": "PREFIX_TUNING"}', encoding="utf-8")
    with pytest.raises(ModelError, match="PREFIX_TUNING"):
        Solver(adapter=tmp_path)
    config.write_text('{"peft_type": "LORA", "layer_replication": [[0, 2]]}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"layer_replication=\[\[0, 2\]\]"):
        Solver(adapter=tmp_path)
    config.write_text('{"peft_type": "LORA", "alora_invocation_tokens": [5]}', encoding="utf-8")
    with pytest.raises(ModelError, match="alora_invocation_tokens: it acts after those"):
        Solver(adapter=tmp_path)
    config.write_text('{"peft_type": "LORA"}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"neither adapter_model\.safetensors nor .*\.bin"):
        Solver(adapter=tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"arbor-search\[adapters\]"):
        adapters.check_adapter(str(tmp_path))
