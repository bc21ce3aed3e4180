"""The page that shows a run: what is in the file, before any browser opens it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.fake_run import fake_run, header, tick
from support.run_cli import in_process

from arbor.events import Ended, Opened
from arbor.trace import TraceWriter
from arbor.view import (
    html_page,
    notebook_frame,
    read_page_trace,
)

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\u2029<!--"


def written(path: Path, seed: int = 1) -> Path:
    with TraceWriter(path, clock=tick()) as writer:
        for event in fake_run(seed):
            writer(event)
    return path


def unpacked(page: str) -> list[Any]:
    """The data of every run in a page."""
    packed = re.findall(r'<script type="application/octet-stream" class="run">(.*?)</script>', page)
    return [json.loads(gzip.decompress(base64.b64decode(each))) for each in packed]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "run.arbor.jsonl")


def test_a_page_holds_every_event_of_its_trace(trace: Path) -> None:
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]

    (data,) = unpacked(html_page(read_page_trace(trace)))

    assert data["name"] == "run.arbor.jsonl" and data["banner"] == ""
    assert [record["i"] for record in data["records"]] == [line["i"] for line in lines]
    for record, line in zip(data["records"], lines, strict=True):
        ids = line.pop("ids", None)
        assert record == (line if ids is None else line | {"tokens": len(ids)})


def test_the_page_of_a_command_has_the_seconds_of_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = tmp_path / "run.arbor.jsonl", tmp_path / "run.html"

    in_process(capsys)("solve", "4 5 6 10", "--trace", str(trace), "--html", str(page))

    written = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    (data,) = unpacked(page.read_text(encoding="utf-8"))
    assert [each["e"] for each in data["records"]] == [each["e"] for each in written]
    assert data["records"][0]["t"] == 0, "the model was read before"
    assert all(
        abs(shown["t"] - each["t"]) < 0.1
        for shown, each in zip(data["records"], written, strict=True)
    )


def test_plain_and_gzip_traces_give_the_same_data(tmp_path: Path) -> None:
    plain = read_page_trace(written(tmp_path / "a.arbor.jsonl"))
    packed = read_page_trace(written(tmp_path / "a.arbor.jsonl.gz"))

    assert plain.records == packed.records


def test_a_page_names_no_address_and_forbids_all_of_them(trace: Path) -> None:
    page = html_page(read_page_trace(trace))

    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1] == (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    )
    assert "://" not in page
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:,|#)""", page)
    assert "@import" not in page and "url(" not in page


def test_hostile_text_is_nowhere_in_the_file_as_text(tmp_path: Path) -> None:
    path = tmp_path / f"run{'<b>'}.arbor.jsonl"
    with TraceWriter(path, clock=tick()) as writer:
        writer(header(problem=HOSTILE))
        writer(Opened(0, None, 0, 0, 3, HOSTILE))
        writer(Ended("exhausted", 1))

    page = html_page(read_page_trace(path))

    assert "onerror" not in page and "alert(" not in page and "\u2028" not in page
    assert unpacked(page)[0]["records"][1]["text"] == HOSTILE


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("not JSON", "not JSON"),
        ('{"e":"evict"}', "an event without its fields"),
        ("[1,2]", "not an object"),
        ('{"e":"retain","x":NaN}', "not a number of JSON"),
    ],
)
def test_lines_that_are_not_events_are_left_out_and_counted(
    trace: Path, line: str, what: str
) -> None:
    before = len(read_page_trace(trace).records)
    with trace.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")

    recording = read_page_trace(trace)

    assert len(recording.records) == before, what
    assert "is unreadable" in recording.banner


def test_a_trace_that_breaks_off_has_a_banner(trace: Path) -> None:
    data = trace.read_bytes()
    trace.write_bytes(data[: len(data) * 6 // 10])

    recording = read_page_trace(trace)

    assert recording.banner.startswith("incomplete trace")
    assert len(recording.records) > 5


def test_a_frame_for_notebooks_cannot_be_left(trace: Path) -> None:
    page = html_page(read_page_trace(trace))

    frame = notebook_frame(page)

    inside = re.fullmatch(
        r'<div [^<>]*><iframe srcdoc="([^"]*)" sandbox="allow-scripts" [^<>]*></iframe></div>',
        frame,
    )
    assert inside is not None
    assert "<" not in inside[1]
