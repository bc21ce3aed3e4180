"""Warm starts: the KV of prompts outlives a run, comes back bit for bit, or is computed again."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build
from support.run_cli import REAL, environment, in_process
from support.trees import QUESTIONS, Lab
from test_full_disk import limited
from test_prefix_sharing import growth, opened, run

from arbor import Solver
from arbor.cli.solve import numbers_line
from arbor.controllers.tot import ToT
from arbor.engine import scheduler
from arbor.errors import UsageError
from arbor.events import Event, Forwarded, Shared
from arbor.forest import LEAST_COMMON
from arbor.memory.prompt_files import ABANDONED_S, BLOCK, HEADER, PromptFiles
from arbor.metrics import Metrics, MetricsFold
from arbor.model import kv_identity as identities
from arbor.model import model_identity
from arbor.model.loading import ModelLocation, locate_model
from arbor.run.keep_kv import KeepKV
from arbor.trace.fold import Replay
from arbor.tree import ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

ONE, OTHER = "1" * 32, "2" * 32
NUMBERS = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG = np.array([(7 * i * i + 3 * i) % 90 for i in range(3 * BLOCK + 5)], np.int64)
GIB = 1 << 30


def files_in(folder: Path, identity: str = ONE, limit: int = GIB) -> PromptFiles:
    return PromptFiles(folder, identity, limit)


def rows_for(tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """KV of a prompt: any bits, NaN and infinities included."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    bits = torch.randint(0, 256, (len(tokens), NUMBERS * dtype.itemsize), generator=generator)
    return bits.to(torch.uint8).view(dtype)


def save(files: PromptFiles, tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
    rows = rows_for(tokens, dtype)
    files.save(tokens, NUMBERS * dtype.itemsize, lambda offsets: rows[torch.from_numpy(offsets)])


def load(
    files: PromptFiles, tokens: np.ndarray, dtype: torch.dtype = torch.float32, first: int = 0
) -> dict[int, bytes]:
    """What comes back of a prompt, by token."""
    offsets = np.arange(first, files.find(tokens))
    return {
        int(offset): bits(row)
        for here, rows in files.load(tokens, offsets, NUMBERS, dtype)
        for offset, row in zip(here, rows, strict=True)
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def entries(folder: Path) -> list[Path]:
    """Files with KV, those used last first."""
    return sorted(folder.rglob("*.kv"), key=lambda path: -path.stat().st_mtime_ns)


def another(tokens: np.ndarray, at: int) -> np.ndarray:
    """A prompt that differs from one token on."""
    changed = tokens.copy()
    changed[at] += 1
    return changed


# Files


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    save(files_in(tmp_path), LONG, dtype)
    rows = rows_for(LONG, dtype)

    for first in (0, BLOCK - 1, BLOCK + 3):
        back = load(files_in(tmp_path), LONG, dtype, first)
        assert back == {at: bits(rows[at]) for at in range(first, 3 * BLOCK)}


def test_the_longest_common_beginning_is_found_by_whole_files(tmp_path: Path) -> None:
    save(files_in(tmp_path), LONG)
    found = files_in(tmp_path).find

    assert found(LONG) == found(np.append(LONG, 1)) == 3 * BLOCK
    for at in range(len(LONG)):
        assert found(another(LONG, at)) == at // BLOCK * BLOCK
    for length in (0, 1, BLOCK - 1, BLOCK + 1, 2 * BLOCK - 1):
        assert found(LONG[:length]) == length // BLOCK * BLOCK
    assert found(LONG[: 2 * BLOCK]) == 2 * BLOCK - 1, "the last token is computed in any case"
    assert len(entries(tmp_path)) == 3
    assert found(LONG[BLOCK:]) == 0, "other positions"
    assert found(np.concatenate([LONG[BLOCK:], LONG])) == 0


def test_prompts_have_files_in_common(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    save(files, LONG)
    save(files, another(LONG, 2 * BLOCK))
    assert len(entries(tmp_path)) == 4
    save(files, another(LONG, 0))
    assert len(entries(tmp_path)) == 7, "a file's name depends on every token before"


def test_only_its_user_may_read_the_kv(tmp_path: Path) -> None:
    save(files_in(tmp_path / "some" / "where"), LONG)
    assert (tmp_path / "some" / "where" / ONE).stat().st_mode & 0o777 == 0o700


def test_a_prompt_is_written_once(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    save(files, LONG)
    files.save(LONG, NUMBERS * 4, lambda offsets: pytest.fail("it is there"))


def test_another_identity_finds_nothing(tmp_path: Path) -> None:
    save(files_in(tmp_path), LONG)
    assert files_in(tmp_path, OTHER).find(LONG) == 0


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "header alone": lambda data: data[: HEADER.size],
    "longer": lambda data: data + b"\0",
    "another format": lambda data: b"X" + data[1:],
    "another key": lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:],
    "another checksum": lambda data: data[:25] + bytes([data[25] ^ 1]) + data[26:],
    "first bit": lambda data: data[:32] + bytes([data[32] ^ 128]) + data[33:],
    "last bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "text": lambda data: b"hello",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_deleted_and_reported_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(files_in(tmp_path), LONG)
    second = entries(tmp_path)[1]
    second.write_bytes(DAMAGE[kind](second.read_bytes()))
    files = files_in(tmp_path)

    with caplog.at_level(logging.WARNING):
        back = load(files, LONG)

    assert sorted(back) == [*range(BLOCK), *range(2 * BLOCK, 3 * BLOCK)]
    assert not second.exists()
    (line,) = caplog.messages
    assert line.startswith("1 damaged file(s)") and second.name in line
    assert files.find(LONG) == BLOCK
    save(files, LONG)
    assert len(load(files, LONG)) == 3 * BLOCK


def test_a_file_of_another_model_under_this_name_is_deleted(tmp_path: Path) -> None:
    save(files_in(tmp_path, OTHER), LONG)
    (theirs,) = tmp_path.iterdir()
    save(files_in(tmp_path), LONG)
    mine, foreign = entries(tmp_path / ONE)[0], entries(theirs)[0]
    shutil.copy(foreign, mine)

    assert sorted(load(files_in(tmp_path), LONG)) == list(range(BLOCK, 3 * BLOCK))
    assert not mine.exists() and foreign.exists()


def test_another_shape_or_dtype_under_this_name_is_not_loaded(tmp_path: Path) -> None:
    save(files_in(tmp_path), LONG, torch.float32)
    assert load(files_in(tmp_path), LONG, torch.bfloat16) == {}


def test_a_device_that_cannot_read_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(files_in(tmp_path), LONG)
    files = files_in(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(np, "fromfile", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    with caplog.at_level(logging.WARNING):
        assert load(files, LONG) == {}
        assert files.find(LONG) == 0 and load(files, LONG) == {}
    (line,) = caplog.messages
    assert line.startswith("3 damaged file(s)") and "Input/output error" in line


def test_a_file_that_another_process_evicts_meanwhile_is_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(files_in(tmp_path), LONG)
    files = files_in(tmp_path)
    offsets = np.arange(files.find(LONG))
    entries(tmp_path)[0].unlink()

    with caplog.at_level(logging.WARNING):
        (one, _), (two, _) = files.load(LONG, offsets, NUMBERS, torch.float32)
    assert [*one, *two] == list(range(BLOCK, 3 * BLOCK))
    assert caplog.messages == []


# The limit

SIZE = HEADER.size + BLOCK * NUMBERS * 4


def prompts(count: int) -> list[np.ndarray]:
    """Prompts of one file each."""
    return [LONG[: BLOCK + 1] + 100 * place for place in range(count)]


def there(folder: Path, each: Sequence[np.ndarray]) -> list[bool]:
    return [files_in(folder).find(prompt) == BLOCK for prompt in each]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    each = prompts(6)
    files = files_in(tmp_path, limit=3 * SIZE)
    for prompt in each[:3]:
        save(files, prompt)
    assert load(files, each[0]), "a load is a use"
    save(files, each[3])
    assert there(tmp_path, each) == [True, False, True, True, False, False]
    save(files, each[2])  # nothing to write, and a use
    save(files, each[4])
    assert there(tmp_path, each) == [False, False, True, True, True, False]
    save(files_in(tmp_path, OTHER, limit=3 * SIZE), each[5])
    assert there(tmp_path, each) == [False, False, True, False, True, False]
    assert len(entries(tmp_path)) == 3, "another model's file counts"


def test_of_one_prompt_the_last_files_go_first(tmp_path: Path) -> None:
    files = files_in(tmp_path, limit=4 * SIZE + 1)
    save(files, LONG)
    save(files, prompts(3)[1])
    save(files, prompts(3)[2])
    assert files.find(LONG) == 2 * BLOCK


def test_the_files_of_a_prompt_make_no_room_for_its_others(tmp_path: Path) -> None:
    files = files_in(tmp_path, limit=3 * SIZE)
    save(files, LONG[:BLOCK])
    save(files, prompts(3)[1])
    save(files, prompts(3)[2])
    save(files, LONG)
    assert files.find(LONG) == 3 * BLOCK


def test_a_prompt_larger_than_the_limit_is_kept_in_part(tmp_path: Path) -> None:
    save(files_in(tmp_path, limit=3 * SIZE - 1), LONG)
    assert files_in(tmp_path).find(LONG) == 2 * BLOCK
    save(files_in(tmp_path / "small", limit=SIZE - 1), LONG)
    assert not (tmp_path / "small").exists()


def test_what_other_processes_write_is_counted(tmp_path: Path) -> None:
    each = prompts(40)
    mine, theirs = (files_in(tmp_path, limit=20 * SIZE) for _ in range(2))
    for one, other in zip(each[::2], each[1::2], strict=True):
        save(mine, one)
        save(theirs, other)
        assert len(entries(tmp_path)) <= 22


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path) -> None:
    old = time.time() - 2 * ABANDONED_S
    save(files_in(tmp_path), LONG)
    model = tmp_path / ONE
    notes = [tmp_path / "notes.kv", model / "notes.txt", tmp_path / "more" / f"{ONE}.kv"]
    drafts = [model / ".arbor-1-2", model / ".arbor-3-4"]
    for path in (*notes, *drafts):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10 * SIZE)
        os.utime(path, (old, old))
    os.utime(drafts[1])

    save(files_in(tmp_path, limit=SIZE), prompts(2)[1])

    assert all(path.exists() for path in notes), "these are not arbor's"
    assert [path.exists() for path in drafts] == [False, True], "a fresh one is being written"
    assert there(tmp_path, prompts(2)) == [False, True]


# Several processes, and folders that fail

AT_ONCE = """
import logging, random, sys
from pathlib import Path
from test_warm_start import SIZE, LONG, bits, files_in, load, rows_for, save

logging.basicConfig(level=logging.WARNING)
random.seed(int(sys.argv[2]))
files, loaded = files_in(Path(sys.argv[1]), limit=9 * SIZE), 0
for _ in range(250):
    prompt = LONG + 100 * random.randrange(4)
    rows, back = rows_for(prompt), load(files, prompt)
    assert all(bits(rows[at]) == row for at, row in back.items())
    loaded += len(back)
    save(files, prompt)
assert loaded
"""


@pytest.mark.slow
def test_two_processes_use_a_folder_at_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", AT_ONCE, str(tmp_path), str(seed)],
            env=environment(),
            stderr=subprocess.PIPE,
        )
        for seed in range(2)
    ]
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert (process.returncode, said) == (0, b"")
    assert {path.suffix for path in (tmp_path / ONE).iterdir()} == {".kv"}, "no drafts are left"


@pytest.mark.parametrize("kind", ["a file", "read-only", "not made", "full"])
def test_a_folder_that_fails_is_reported_once_and_ends_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    reason = {"a file": "File exists", "not made": "No space", "full": "No space"}
    if kind == "a file":
        folder.mkdir()
        (folder / ONE).write_bytes(b"")
    elif kind == "read-only":  # root may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
        monkeypatch.setattr(Path, "write_bytes", no_space)
    else:
        monkeypatch.setattr(Path, "mkdir" if kind == "not made" else "write_bytes", no_space)
    files = files_in(folder)

    with caplog.at_level(logging.WARNING):
        save(files, LONG)
        save(files, another(LONG, 0))

    (line,) = caplog.messages
    assert line.startswith("no more KV of prompts is kept: ")
    assert reason.get(kind, "cannot be written") in line
    assert files.find(LONG) == 0 and load(files, LONG) == {}
    assert not list(tmp_path.rglob(".arbor-*"))


def no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# Engines

EXAMPLES = tuple(int(token) + 5 for token in LONG[: 2 * BLOCK + 8])
FIRST, SECOND = (*EXAMPLES, 9, 3), (*EXAMPLES, 60, 2, 71)
COMMON = 2 * BLOCK


def lab_with(folder: Path, **settings: Any) -> Lab:
    return Lab(build("llama"), debug=True, prompts=files_in(folder), **settings)


def is_consistent(lab: Lab) -> None:
    """The account of the slots adds up, within the budget."""
    assert lab.memory.used <= lab.memory.peak <= lab.memory.slots
    lab.memory.check()


def loaded(lab: Lab) -> int:
    fold = MetricsFold()
    for event in lab.events:
        fold(event)
    return fold.metrics().tokens_loaded


def kv_of(lab: Lab, tree: ThoughtTree) -> torch.Tensor:
    return lab.memory.pool.gather(tree.root.span.slot)


def test_a_later_engine_computes_only_the_rest(tmp_path: Path) -> None:
    first = lab_with(tmp_path)
    one = first.plant(prompt=FIRST)
    assert first.rows() == len(FIRST) and loaded(first) == 0
    assert not any(isinstance(event, Shared) for event in first.events)

    later = lab_with(tmp_path)
    two = later.plant(prompt=SECOND)

    assert later.rows() == len(SECOND) - COMMON
    assert loaded(later) == COMMON
    assert bits(kv_of(later, two)[:COMMON]) == bits(kv_of(first, one)[:COMMON])
    assert two.root.span.exact.all()
    cold = Lab(build("llama"))
    want = cold.ask([cold.plant(prompt=SECOND).root] * 2, QUESTIONS)
    assert torch.allclose(later.ask([two.root] * 2, QUESTIONS), want, rtol=1e-5, atol=1e-5)
    is_consistent(later)


def test_a_prompt_seen_before_costs_its_end(tmp_path: Path) -> None:
    prompt = EXAMPLES[:COMMON]
    lab_with(tmp_path).plant(prompt=prompt)
    again = lab_with(tmp_path)
    tree = again.plant(prompt=prompt)
    assert again.rows() == 1 and loaded(again) == COMMON - 1
    assert again.sprout([(tree.root, 2)])


def test_what_the_device_holds_is_not_loaded(tmp_path: Path) -> None:
    lab = lab_with(tmp_path)
    lab.plant(prompt=FIRST)
    lab.plant(prompt=SECOND)
    assert loaded(lab) == 0
    assert lab.rows() == len(FIRST) + len(SECOND) - len(EXAMPLES)


@pytest.mark.parametrize("share", ["exact", "off"])
def test_prompts_that_begin_together_load_their_common_part_once(
    share: Any, tmp_path: Path
) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    alone = 2 * len(EXAMPLES) + 5
    pool = alone if share == "off" else alone - len(EXAMPLES)  # not one slot to spare
    lab = lab_with(tmp_path, share=share)
    trees = opened(lab, FIRST, SECOND, pool=pool)
    operations = [lab.begin_extend(tree.root) for tree in trees]
    run(lab)
    for operation in operations:
        operation.result()

    sources = [event.source for event in lab.events if isinstance(event, Shared)]
    if share == "off":
        assert loaded(lab) == 2 * COMMON and sources == ["file", "file"]
        assert lab.rows() == alone - 2 * COMMON
    else:
        assert loaded(lab) == COMMON and sorted(sources) == ["device", "device", "file"]
        assert lab.rows() == pool - COMMON
    for tree in trees:
        assert tree.root.span.exact.all()
    is_consistent(lab)


def test_a_longer_beginning_is_loaded_after_what_an_earlier_prompt_computes(tmp_path: Path) -> None:
    """Both have 40 tokens in common, 32 of them in a file; the second has 64 in files."""
    longer = (*EXAMPLES[:40], *EXAMPLES[:40])
    shorter = (*EXAMPLES[:40], 1, 2)
    lab_with(tmp_path).plant(prompt=longer)
    lab = lab_with(tmp_path)
    trees = opened(lab, shorter, longer, pool=len(shorter) + len(longer) - 40)
    operations = [lab.begin_extend(tree.root) for tree in trees]
    run(lab)

    for tree, operation in zip(trees, operations, strict=True):
        operation.result()
        assert tree.root.span.exact.all()
    assert loaded(lab) == 32 + 24
    assert lab.memory.used == lab.memory.slots
    is_consistent(lab)


@pytest.mark.parametrize("kept", [0, 1])
def test_what_could_not_be_loaded_is_computed_once_for_all(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    for path in entries(tmp_path)[kept:]:
        path.write_bytes(b"")
    lab = lab_with(tmp_path)
    pool = 2 * len(EXAMPLES) + 5 - len(EXAMPLES)
    trees = opened(lab, FIRST, SECOND, pool=pool)
    operations = [lab.begin_extend(tree.root) for tree in trees]
    run(lab)

    for tree, operation in zip(trees, operations, strict=True):
        operation.result()
        assert tree.root.span.exact.all()
    assert loaded(lab) == kept * BLOCK and lab.rows() == pool - kept * BLOCK
    assert lab.memory.used == pool
    is_consistent(lab)
    assert files_in(tmp_path).find(np.array(FIRST)) == COMMON, "it is kept anew"


@settings(max_examples=30, deadline=None)
@given(
    kept=st.lists(st.integers(0, 5), max_size=3),
    opened_now=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    harm=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["gone", "damaged"])), max_size=4),
    most=st.sampled_from([17, 50, 8192]),
    spare=st.sampled_from([0, 0, 13]),
    first=st.integers(0, 2),
)
def test_any_prompts_over_any_files_fit_their_least_room_and_are_exact(
    kept: list[int],
    opened_now: list[int],
    harm: list[tuple[int, str]],
    most: int,
    spare: int,
    first: int,
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        for each in kept:
            lab_with(folder).plant(prompt=FAMILY[each])
        files = entries(folder)
        for place, kind in harm:
            if place < len(files):
                files[place].unlink(missing_ok=True)
                if kind == "damaged":
                    files[place].write_bytes(b"?" * 100)
        patched.setattr(scheduler, "MOST_NEW", most)
        chosen = [FAMILY[each] for each in opened_now]
        lab = lab_with(folder)
        trees = opened(lab, *chosen, pool=least_room(chosen) + spare)
        for some in (trees[:first], trees[first:]):
            operations = [lab.begin_extend(tree.root) for tree in some]
            run(lab)
            for operation in operations:
                operation.result()
        for tree, each in zip(trees, opened_now, strict=True):
            assert tree.root.span.exact.all()
            assert torch.allclose(kv_of(lab, tree), cold_kv(each), rtol=1e-4, atol=1e-5)
        lab.memory.check()
        assert lab.memory.used == least_room(chosen)


START = tuple(int(token) + 5 for token in LONG)
FAMILY = (
    START[:70],
    START[:64],
    START[:33],
    (*START[:40], *START[:50]),
    (*START[:70], 3, 4, 5),
    START[20:60],
)


def least_room(chosen: Sequence[tuple[int, ...]]) -> int:
    """Slots of prompts that share their beginnings of at least `LEAST_COMMON` tokens."""
    total = 0
    for place, prompt in enumerate(chosen):
        common = [beginning(prompt, other) for other in chosen[:place]]
        total += len(prompt) - max((c for c in common if c >= LEAST_COMMON), default=0)
    return total


def beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two prompts begin with alike."""
    alike = (a == b for a, b in zip(one, other, strict=False))
    return next((at for at, same in enumerate(alike) if not same), min(len(one), len(other)))


@functools.cache
def cold_kv(each: int) -> torch.Tensor:
    """KV of a prompt that nothing was loaded for."""
    lab = Lab(build("llama"))
    return kv_of(lab, lab.plant(prompt=FAMILY[each]))


def test_a_prompt_computed_in_parts_loads_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MOST_NEW", 20)
    first = lab_with(tmp_path)
    first.plant(prompt=FIRST)
    assert len(entries(tmp_path)) == 2
    later = lab_with(tmp_path)
    end = tuple(range(10, 60))
    tree = later.plant(prompt=(*EXAMPLES, *end))

    assert loaded(later) == COMMON
    assert later.rows() == len(EXAMPLES) + len(end) - COMMON
    assert max(e.rows for e in later.events if isinstance(e, Forwarded)) == 20
    assert tree.root.span.exact.all() and len(entries(tmp_path)) == 3
    is_consistent(later)


def test_a_forward_that_fails_keeps_what_was_loaded(tmp_path: Path) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    lab = lab_with(tmp_path)
    tree = ThoughtTree(SECOND)
    lab.open(tree, 400)
    forward = lab.runner.forward

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    lab.runner.forward = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        lab.extend(tree.root)
    assert tree.root.span.exact.sum() == COMMON == lab.memory.used
    lab.runner.forward = forward  # type: ignore[method-assign]
    lab.extend(tree.root)
    assert lab.rows() == len(SECOND) - COMMON and loaded(lab) == COMMON
    is_consistent(lab)


def test_a_copy_that_fails_leaves_no_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    lab = lab_with(tmp_path)
    tree = ThoughtTree(SECOND)
    lab.open(tree, 400)

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(lab.memory.pool, "scatter", fail)
        with pytest.raises(KeyboardInterrupt):
            lab.extend(tree.root)
    assert lab.memory.used == 0
    lab.extend(tree.root)
    assert loaded(lab) == COMMON
    is_consistent(lab)


def test_nothing_is_kept_of_a_prompt_that_was_cut_off(tmp_path: Path) -> None:
    lab = lab_with(tmp_path)
    tree = ThoughtTree(FIRST)
    lab.open(tree, 400)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    forward, lab.runner.forward = lab.runner.forward, fail  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        lab.extend(tree.root)
    assert entries(tmp_path) == []
    lab.runner.forward = forward  # type: ignore[method-assign]
    lab.extend(tree.root)
    assert len(entries(tmp_path)) == 2


def test_a_search_evicts_what_was_loaded_and_computes_it_again(tmp_path: Path) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    small = len(FIRST) + 8
    lab, cold = lab_with(tmp_path), Lab(build("llama"))
    grown = []
    for each in (lab, cold):
        tree = each.plant(small, FIRST)
        leaves = each.grow([(tree.root, 3)], growth())
        grown.append([leaf.tokens for leaf in leaves])
    assert grown[0] == grown[1] and loaded(lab) == COMMON
    is_consistent(lab)


def test_room_is_made_before_anything_is_loaded(tmp_path: Path) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    lab = lab_with(tmp_path)
    other = tuple(reversed(EXAMPLES))
    pool = len(SECOND) + 10  # less than both prompts
    lab.plant(pool, other)
    lab.plant(pool, SECOND)
    assert loaded(lab) == COMMON
    is_consistent(lab)


def test_what_a_search_evicts_is_not_looked_up_again(tmp_path: Path) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    lab = lab_with(tmp_path)
    tree = lab.plant(prompt=FIRST)
    lab.memory.evict(tree.root, np.arange(5, 50))
    before = lab.rows()
    lab.extend(tree.root)
    assert lab.rows() == before + 45 and loaded(lab) == COMMON


def test_nothing_is_loaded_while_blocks_are_hidden(tmp_path: Path) -> None:
    lab_with(tmp_path).plant(prompt=FIRST)
    lab = lab_with(tmp_path, share="off")
    first, second = opened(lab, tuple(reversed(EXAMPLES)), FIRST)
    lab.extend(first.root)
    (leaf,) = lab.grow([(first.root, 1)], growth())
    with lab.hiding([leaf]):
        lab.extend(second.root)
    assert loaded(lab) == 0
    is_consistent(lab)


def test_lossy_engines_keep_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="only exact KV"):
        lab_with(tmp_path, mode="lossy", rehydrate="off")


# Identities


def sapling(folder: Path) -> Path:
    """A copy of the built-in model's directory."""
    source = Path(locate_model("builtin:sapling").path)
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, folder)
    return folder


def test_a_model_is_identified_by_its_weights_and_settings(tmp_path: Path) -> None:
    folder = sapling(tmp_path / "model")
    of = model_identity.model_identity
    first = of(locate_model(folder))
    assert first is not None
    assert of(locate_model(sapling(tmp_path / "copy"))) == first

    (weights,) = folder.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert (second := of(locate_model(folder))) != first
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8").replace("{", '{"rope_theta": 7,', 1), "utf-8")
    assert of(locate_model(folder)) not in (first, second)


def test_a_model_of_the_hub_is_identified_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commit: list[str | None] = ["abc"]
    monkeypatch.setattr(model_identity, "cached_commit", lambda source: commit[0])
    source = ModelLocation("a/b", "a/b", "main")
    assert model_identity.model_identity(source) == "a/b@abc"
    assert model_identity.model_identity(ModelLocation("a/c", "a/c")) == "a/c@abc"
    commit[0] = None
    assert model_identity.model_identity(source) is None
    assert model_identity.model_identity(ModelLocation("LlamaForCausalLM", "")) is None


def test_an_identity_names_what_the_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    source = locate_model("builtin:sapling")

    def identity(model: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> str:
        lab = Lab(build(model).to(dtype))
        settings = {"source": source, "backend": "torch", "deterministic": False} | more
        found = identities.kv_identity(lab.runner, **settings)
        assert found is not None
        return found

    first = identity()
    assert identity() == first
    others = [
        identity("llama_mha"),
        identity(dtype=torch.bfloat16),
        identity(backend="native"),
        identity(deterministic=True),
    ]
    with monkeypatch.context() as patched:
        patched.setattr(identities, "FORMAT", "arbor.kv/2")
        others.append(identity())
    with monkeypatch.context() as patched:
        patched.setattr(identities, "_code", lambda: "changed")
        others.append(identity())
    assert len({first, *others}) == 1 + len(others)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_num_threads", lambda: 77)
        assert identity() == first
        assert identity(deterministic=True) != others[3]
    unknown = ModelLocation("LlamaForCausalLM", "")
    lab = Lab(build("llama"))
    assert identities.kv_identity(lab.runner, unknown, "torch", deterministic=False) is None


# Solvers

PROBLEM = (
    "Alice has 12 apples and gives 3 of them to Bob, who has 5 apples of his own already, and then "
    "buys {} more at the market. How many apples do the two of them have now?"
)
SMALL = ToT(beam=2, width=2)


def solver_with(folder: Path | None, **settings: Any) -> Solver:
    given: dict[str, Any] = {"task": "reasoning", "controller": SMALL, "debug": True}
    given |= {"max_depth": 2, "step_tokens": 8}
    return Solver(**given | {"keep_kv": folder} | settings)


def solved(
    folder: Path | None, more: int = 7, **settings: Any
) -> tuple[Any, list[Any], list[Event]]:
    """A solution, its tree and its events, with the trace checked."""
    heard: list[Event] = []
    with solver_with(folder, listeners=(heard.append,), **settings) as solver:
        solution = solver.solve(PROBLEM.format(more))
        tree = [(node.tokens, node.value, node.logprob) for node in solver.engine.tree]
    replay = Replay()
    for event in heard:
        replay(event)
    assert replay.problems == []
    return solution, tree, heard


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_warm_search_is_the_cold_one_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    _, cold, _ = solved(None, **settings)
    first, kept, _ = solved(tmp_path, **settings)
    warm, tree, heard = solved(tmp_path, **settings)
    assert tree == kept == cold
    assert "tokens_loaded" not in first.metrics.to_dict()
    assert warm.metrics.tokens_prefilled == first.metrics.tokens_prefilled
    part = warm.metrics.tokens_loaded
    assert part >= warm.metrics.tokens_prefilled - BLOCK
    assert warm.metrics.rows == first.metrics.rows - part
    (shared,) = (event for event in heard if isinstance(event, Shared))
    assert shared.source == "file" and shared.nodes == ((0, part),)

    _, changed, _ = solved(None, 8, **settings)
    later, tree, _ = solved(tmp_path, 8, **settings)
    assert tree == changed
    assert BLOCK <= later.metrics.tokens_loaded < part, "only what both begin with"


def test_other_models_dtypes_and_modes_find_nothing(tmp_path: Path) -> None:
    kv, model = tmp_path / "kv", sapling(tmp_path / "model")
    assert solved(kv, model=model)[0].metrics.tokens_loaded == 0
    assert solved(kv, model=model)[0].metrics.tokens_loaded > 0
    assert solved(kv, model=model, dtype="bfloat16")[0].metrics.tokens_loaded == 0
    assert solved(kv, model=model, deterministic=True)[0].metrics.tokens_loaded == 0
    (weights,) = model.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert solved(kv, model=model)[0].metrics.tokens_loaded == 0
    assert len(list(kv.iterdir())) == 4


def test_weights_that_nothing_identifies_are_searched_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identities, "model_identity", lambda source: None)
    with caplog.at_level(logging.WARNING):
        solution, _, _ = solved(tmp_path / "kv")
    assert solution.metrics.nodes > 1 and not (tmp_path / "kv").exists()
    (line,) = [each for each in caplog.messages if "no KV is kept" in each]
    assert "the commit of builtin:sapling is not known" in line


def test_the_smallest_budget_suffices(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"deterministic": True}
    _, cold, _ = solved(tmp_path, **settings)
    with solver_with(None) as solver:
        smallest = solver.plan(PROBLEM.format(7)).enough_tokens
    warm, tree, _ = solved(tmp_path, budget=f"{smallest}tok", **settings)
    assert tree == cold
    assert warm.metrics.tokens_loaded > 0 and warm.metrics.peak_tokens <= smallest


def test_several_problems_at_once_load_what_they_share_once(tmp_path: Path) -> None:
    each = [PROBLEM.format(more) for more in (7, 8, 9)]
    with solver_with(None) as solver:
        cold = [solution.answer for solution in solver.solve_batch(each)]
    with solver_with(tmp_path) as solver:
        solver.solve(each[0])
    with solver_with(tmp_path) as solver:
        warm = solver.solve_batch(each, concurrency=3)
    assert [solution.answer for solution in warm] == cold
    tokens = [solution.metrics.tokens_loaded for solution in warm]
    assert sum(tokens) < 1.5 * max(tokens)
    assert sum(solution.metrics.tokens_shared for solution in warm) > max(tokens)


def test_the_folder_is_not_part_of_a_configuration(tmp_path: Path) -> None:
    with solver_with(tmp_path) as solver, solver_with(None) as other:
        assert solver.config == other.config


@pytest.mark.parametrize("size", ["many", "0.5", "100tok", "full"])
def test_what_is_no_size_in_bytes_is_refused(size: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"keep-kv\].*keep_kv_size.*4GiB or 512MiB"):
        Solver(keep_kv=tmp_path, keep_kv_size=size)


def test_where_nothing_can_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"keep-kv\].*not exact.*mode=lossless"):
        Solver(keep_kv=tmp_path, mode="lossy")
    (tmp_path / "file").write_bytes(b"")
    for wrong, reason in (
        (tmp_path / "file", "not a folder"),
        ("", "not a folder"),
        ("x" * 5000, "File name too long"),
        ("~nobody-of-this-name/kv", "home directory"),
    ):
        with pytest.raises(UsageError, match=rf"keep-kv\] keep_kv=.*{reason}.*Name a folder"):
            Solver(keep_kv=wrong)
    with pytest.raises(UsageError, match=r"keep-kv\].*ready model"):
        Solver(build("llama"), tokenizer=object(), keep_kv=tmp_path)
    assert KeepKV.parse(None, "4GiB", "lossy") is None
    assert KeepKV.parse("~/kv", "1MiB", "lossless") == KeepKV(Path.home() / "kv", 1 << 20)


# The command line


def test_the_command_line_keeps_and_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arbor = in_process(capsys)
    words = ["solve", PROBLEM.format(7), "--task", "reasoning", "--max-depth", "2", "--json"]
    words += ["--step-tokens", "8", "--set", f"keep_kv={tmp_path}", "--set", "keep_kv_size=1GiB"]
    first, second = arbor(*words), arbor(*words)
    assert first.code == second.code
    assert "tokens_loaded" not in first.document["metrics"]
    assert second.document["metrics"]["tokens_loaded"] > BLOCK
    assert second.document["answer"] == first.document["answer"]
    wrong = arbor("solve", "4 5 6 10", "--set", f"keep_kv={tmp_path}", "--set", "keep_kv_size=7tok")
    assert wrong.code == 2 and "[keep-kv]" in wrong.err


def test_the_cost_of_a_run_names_what_was_loaded() -> None:
    line = numbers_line("solved", Metrics(tokens_prefilled=1184, tokens_loaded=1160))
    assert " · 1,160 of 1,184 prompt tokens loaded" in line
    assert "loaded" not in numbers_line("solved", Metrics(tokens_prefilled=1184))


@pytest.mark.slow
def test_a_full_disk_ends_no_search(tmp_path: Path) -> None:
    words = ["solve", PROBLEM.format(7), "--task", "reasoning", "--max-depth", "1"]
    done = subprocess.run(
        [sys.executable, "-c", REAL, *words, "--step-tokens", "8", "--set", "keep_kv=kv"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limited(3000),
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "KV of prompts" in line]
    assert "no more KV of prompts is kept" in line and "File too large" in line
    assert entries(tmp_path) == []
