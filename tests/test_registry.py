"""Names, plugins and settings: what the command line writes becomes a component, and back."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from arbor import components, registry
from arbor.components import build, spec_of
from arbor.controllers.ab_mcts import ABMCTS
from arbor.controllers.beam import Beam
from arbor.controllers.dpts import DPTS
from arbor.controllers.mcts import MCTS
from arbor.errors import UsageError
from arbor.registry import BUILTIN, KINDS, names, resolve
from arbor.retention.allocators.by_block import LRU
from arbor.retention.policy import Policy, Protect
from arbor.tasks.countdown import Countdown
from arbor.verifiers.vote import Vote

# names of controllers that stand for settings of a class
READY_CONTROLLERS = ("best-of-n", "rap", "rest-mcts", "rstar")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    depth: int = 2


@dataclass(frozen=True)
class Sample:
    """Has a setting of every kind a component may have."""

    width: int = 4
    share: float = 0.5
    label: str = "plain"
    on: bool = False
    mode: Literal["bfs", "dfs", 3] = "bfs"
    limit: int | None = None
    text: str | None = None
    either: str | int = "auto"
    pair: tuple[int, int] = (1, 2)
    stops: tuple[str, ...] = ("\n\n",)
    colour: Colour = Colour.RED
    inner: Inner = field(default_factory=Inner)
    size: Annotated[int, "tokens"] = 1
    sizes: list[int] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    steps: Mapping[int, tuple[str, ...]] | None = None
    anything: dict = field(default_factory=dict)  # type: ignore[type-arg]
    words: Sequence[str] = ()
    derived: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UsageError("setting-range", f"width={self.width}: it must be at least 1.")


@pytest.fixture(autouse=True)
def fresh_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ARBOR_PLUGINS", raising=False)
    registry._installed.cache_clear()
    yield
    registry._installed.cache_clear()


def install(
    folder: Path, distribution: str, points: str, modules: dict[str, str] | None = None
) -> None:
    """A distribution as an installer would leave it: metadata, entry points, modules."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(points))
    for name, source in (modules or {}).items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))


EXTRA = """
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Mine:
        speed: int = 3
"""


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in BUILTIN[kind]]
)
def test_every_name_stands_for_a_component_and_builds_with_its_defaults(
    kind: str, name: str
) -> None:
    found = resolve(kind, name)

    assert isinstance(found, type) == (kind != "policy" and name not in READY_CONTROLLERS)
    if dataclasses.is_dataclass(found):
        component = build(kind, name)
        assert spec_of(component)["name"] == registry.name_of(component) == name
        assert build(kind, json.loads(json.dumps(spec_of(component)))) == component


@pytest.mark.parametrize(
    ("setting", "written", "value"),
    [
        ("width", "8", 8),
        ("width", 8.0, 8),
        ("share", "1e-2", 0.01),
        ("share", 1, 1.0),
        ("share", "inf", float("inf")),
        ("label", "7", "7"),
        ("on", "true", True),
        ("on", "Off", False),
        ("on", 1, True),
        ("mode", "dfs", "dfs"),
        ("mode", "3", 3),
        ("limit", "none", None),
        ("limit", "5", 5),
        ("limit", None, None),
        ("text", "none", None),
        ("text", "5", "5"),
        ("either", "5", 5),
        ("either", "auto", "auto"),
        ("pair", "3,4", (3, 4)),
        ("pair", [3, 4], (3, 4)),
        ("stops", '["\\n", ";"]', ("\n", ";")),
        ("stops", "a,b", ("a", "b")),
        ("stops", "", ()),
        ("colour", "blue", Colour.BLUE),
        ("colour", Colour.BLUE, Colour.BLUE),
        ("inner", {"depth": "5"}, Inner(5)),
        ("colour", "RED", Colour.RED),
        ("inner", Inner(5), Inner(5)),
        ("size", "5", 5),
        ("sizes", "1,2", [1, 2]),
        ("weights", '{"a": 1, "b": "2e-1"}', {"a": 1.0, "b": 0.2}),
        ("weights", {"a": 1}, {"a": 1.0}),
        ("steps", '{"3": ["x", "y"]}', {3: ("x", "y")}),
        ("steps", "none", None),
        ("anything", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("words", "a,b", ("a", "b")),
        ("words", ["a"], ("a",)),
    ],
)
def test_a_setting_is_read_by_its_type(setting: str, written: Any, value: Any) -> None:
    for spec in (Sample, Sample()):
        built = build("task", spec, **{setting: written})

        assert getattr(built, setting) == value
        assert type(getattr(built, setting)) is type(value)


@pytest.mark.parametrize(
    ("setting", "written"),
    [
        ("weights", "a=1"),
        ("weights", "[1]"),
        ("weights", [1]),
        ("weights", {"a": "heavy"}),
        ("steps", '{"three": []}'),
        ("words", 3),
    ],
)
def test_a_table_or_list_that_does_not_fit_is_refused(setting: str, written: Any) -> None:
    with pytest.raises(UsageError, match=rf"Sample\.{setting}=.*: it must be ") as refused:
        build("task", Sample, **{setting: written})
    assert refused.value.code == "setting-type"


def with_words() -> Iterator[tuple[type[Any], str]]:
    """Every setting of a built-in component, or of a part of one, that is one of a set of words."""
    waiting = [resolve(kind, name) for kind in KINDS for name in BUILTIN[kind]]
    seen: set[type[Any]] = set()
    while waiting:
        component = waiting.pop()
        cls = component if isinstance(component, type) else type(component)
        if cls in seen or not dataclasses.is_dataclass(cls):
            continue
        seen.add(cls)
        for name, hint in get_type_hints(cls).items():
            parts = [hint, *get_args(hint), getattr(component, name, None)]
            waiting += [each for each in parts if dataclasses.is_dataclass(each)]
            if get_origin(hint) is Literal:
                yield cls, name


def test_a_word_that_a_setting_does_not_have_is_refused_in_python_too() -> None:
    settings = list(with_words())
    assert {"Policy.idle", "ToT.strategy", "Combined.rule", "GSM8K.steps"} <= {
        f"{cls.__name__}.{name}" for cls, name in settings
    }
    for cls, name in settings:
        needed = {
            each.name: LRU()
            for each in dataclasses.fields(cls)
            if each.default is each.default_factory is dataclasses.MISSING
        }
        with pytest.raises(UsageError, match=rf"{name}=no such word: it must be \w+"):
            cls(**needed, **{name: "no such word"})


def test_a_plugin_is_named_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "plug",
        "[arbor.controllers]\nmine = extra_b_front:Mine\n[arbor.tasks]\nboom = extra_b_boom:Nothing\n",
        {
            "extra_b": EXTRA,
            "extra_b_front": "from extra_b import Mine\n",
            "extra_b_boom": "raise OSError('no')",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)

    assert names("controller") == (*sorted(BUILTIN["controller"]), "mine")
    assert "extra_b" not in sys.modules

    mine = build("controller", "mine", speed=4)

    assert spec_of(mine) == {"name": "mine", "speed": 4}
    assert build("controller", spec_of(mine)) == mine
    assert "extra_b_boom" not in sys.modules


def test_clashing_names_keep_ours_and_qualify_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "bbb",
        "[arbor.controllers]\ntot = extra_e:Mine\nmine = extra_e:Mine\n",
        {"extra_e": EXTRA},
    )
    install(tmp_path, "aaa", "[arbor.controllers]\nmine = extra_f:Mine\n", {"extra_f": EXTRA})
    monkeypatch.syspath_prepend(tmp_path)

    own = len(BUILTIN["controller"])
    assert names("controller")[own:] == ("bbb/mine", "bbb/tot", "mine")
    assert resolve("controller", "tot").__name__ == "ToT"
    assert resolve("controller", "mine").__module__ == "extra_f"
    assert resolve("controller", "bbb/mine").__module__ == "extra_e"


# Names of one's own


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> registry.Register:
    """An empty table of registered names, for one test."""
    register = registry.Register()
    monkeypatch.setattr(registry, "register", register)
    return register


@dataclass(frozen=True)
class Lowest:
    """An allocator of one's own."""

    reserve: int = 0

    def counts(self, blocks: Any, room: int, scorer: Any) -> Any:
        return blocks.floor


LOWEST = Policy(Lowest(), protect=Protect(tail=3))


def test_a_policy_is_a_value_that_knows_the_name_it_was_given(own: registry.Register) -> None:
    named = own.policy("lowest", LOWEST)
    changed = build("policy", "lowest,reserve=2,scorer=random")
    spec = json.loads(json.dumps(spec_of(changed)))

    assert resolve("policy", "lowest") is named
    assert (LOWEST.name, LOWEST.registered_as) == ("Lowest", "")
    assert named.name == changed.name == spec["name"] == "lowest"
    assert spec["allocator"] == {"reserve": 2} and spec["scorer"] == {"name": "random", "seed": 0}
    assert build("policy", spec) == changed != named == build("policy", "lowest")
    assert components.settings_of(named)[:13] == (
        "allocator",
        "scorer",
        "protect",
        "spares_paths",
        "idle",
        "among",
        "trigger",
        "granularity",
        "heads",
        "safeguard",
        "beta",
        "observed",
        "reserve",
    )
    assert own.policy("lowest", Policy(Lowest())).protect == Protect(), "a notebook's cell, edited"
    with pytest.raises(UsageError, match="is taken"):
        own.policy("lowest", Policy(LRU()))
    with pytest.raises(UsageError, match="no setting 'registered_as'"):
        build("policy", "lowest", registered_as="other")


@pytest.mark.parametrize("name", ["", "a,b", "a b", " a", "a\n", "a=b", "a:b", Lowest, None])
def test_a_name_that_the_command_line_cannot_give_is_refused(
    name: Any, own: registry.Register
) -> None:
    for register in (own.allocator, lambda name: own.allocator(name, Lowest)):
        with pytest.raises(UsageError, match="invalid allocator name") as refused:
            register(name)
        assert "commas" in refused.value.hint
    assert not own.of("allocator")


@dataclass(frozen=True)
class Typed:
    """A component whose types only a type checker knows."""

    width: Unknown = 4  # type: ignore[name-defined]  # noqa: F821
    sizes: far.Sizes[int] | None = None  # type: ignore[name-defined]  # noqa: F821
    inner: Part = field(default_factory=Inner)  # type: ignore[name-defined]  # noqa: F821
    share: float = 0.5


@dataclass(frozen=True)
class TypedBeam(Beam):
    most: Unknown = 4  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("kind", "component", "message"),
    [
        ("controller", DPTS(parallel=2.5), "dpts.parallel=2.5: it must be a whole number."),
        ("controller", MCTS(rollout=1.5), "mcts.rollout=1.5: it must be a whole number."),
        ("controller", ABMCTS(seed=True), "ab-mcts.seed=True: it must be a whole number."),
        ("controller", Beam(threshold="0"), "beam.threshold=0: it must be a number."),
        ("task", Countdown(fewest=4.5), "countdown.fewest=4.5: it must be a whole number."),
        ("verifier", Vote(choices=3.0), "vote.choices=3.0: it must be a whole number."),
        (
            "policy",
            Policy(LRU(), protect=Protect(recent=1.5)),
            "arbor.retention.policy:Policy.recent=1.5: it must be a whole number.",
        ),
    ],
)
def test_numbers_of_a_ready_component_are_of_their_fields_types(
    kind: str, component: Any, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        build(kind, component)

    assert (refused.value.code, refused.value.message) == ("setting-type", message)


@pytest.mark.parametrize(
    "component",
    [
        DPTS(parallel=np.int64(2), exploration=1, stop_value=None),
        MCTS(rollout=None, first_play=math.inf),
        Typed(),
    ],
)
def test_a_ready_component_keeps_numbers_of_its_fields_types(component: Any) -> None:
    assert build("controller", component) is component


def test_a_type_that_only_a_type_checker_knows_spoils_no_other_setting() -> None:
    built = build("task", Typed, share="0.25", depth="3", width=5, sizes="none")

    assert built == Typed(5, None, Inner(3), 0.25)
    assert build("controller", TypedBeam, width="2", most=5) == TypedBeam(width=2, most=5)


@pytest.mark.parametrize(("setting", "type_name"), [("width", "Unknown"), ("sizes", "far.Sizes")])
def test_a_text_for_such_a_type_is_refused_by_name(setting: str, type_name: str) -> None:
    with pytest.raises(UsageError) as refused:
        build("task", Typed, **{setting: "5"})

    assert refused.value.message == (
        f"Typed.{setting}=5: it must be of the type {type_name}, "
        "which is imported for type checkers alone."
    )
    assert "outside of 'if TYPE_CHECKING:'" in refused.value.hint


# Files and modules of the working directory


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("missing.py:Mine", "missing.py: no such file", "looked for from"),
        ("broken.py:Mine", "RuntimeError: no", ""),
        ("empty.py:Mine", "has no attribute 'Mine'", ""),
    ],
)
def test_a_file_that_is_missing_or_broken_is_named(
    name: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')")
    (tmp_path / "empty.py").write_text("")

    with pytest.raises(UsageError, match=f"'{name}'") as refused:
        resolve("policy", name)

    assert refused.value.code == "policy-broken"
    assert message in refused.value.message and hint in refused.value.hint
    assert "ARBOR_PLUGINS" not in refused.value.hint


def test_a_class_of_kvpress_without_its_folder_names_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ModuleType("kvpress")
    vars(package)["SnapKVPress"] = type("SnapKVPress", (), {"__module__": "kvpress.presses"})
    monkeypatch.setitem(sys.modules, "kvpress", package)
    monkeypatch.setattr(registry, "ADAPTERS", {})

    with pytest.raises(UsageError, match="arbor/integrations/kvpress") as raised:
        registry.resolve("policy", "kvpress:SnapKVPress")

    assert raised.value.code == "policy-broken"


def test_kvpress_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)  # so that importing it fails

    with pytest.raises(UsageError, match="ModuleNotFoundError") as raised:
        registry.resolve("policy", "kvpress:SnapKVPress")

    assert raised.value.code == "policy-broken"
    assert raised.value.hint.startswith("pip install --no-deps kvpress==")
    docs = Path(__file__).parents[1] / "docs" / "retention.md"
    assert raised.value.hint.partition(" &&")[0] in docs.read_text(encoding="utf-8")


def test_a_ready_component_of_a_file_is_named_from_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from arbor.components import build\nMINE = build('policy', 'h2o')\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)

    policy = build("policy", "mine.py:MINE")

    assert spec_of(policy)["name"] == f"{tmp_path / 'mine.py'}:MINE"
    monkeypatch.chdir("/")
    assert build("policy", spec_of(policy)) == policy


def test_what_a_file_holds_is_pickled_by_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "version 1.2"
    folder.mkdir()
    (folder / "kept.py").write_text(
        "from arbor.controllers.chain import Chain\nclass Kept(Chain): ...\n"
    )
    kept = resolve("controller", f"{folder / 'kept.py'}:Kept")(samples=3)
    data = pickle.dumps(kept)

    assert pickle.loads(data) == kept
    code = "import sys, pickle, arbor.registry; print(pickle.load(sys.stdin.buffer))"
    there = subprocess.run(
        [sys.executable, "-c", code],
        input=data,
        capture_output=True,
        cwd=Path(registry.__file__).parents[1],
    )
    assert there.stdout.decode().strip() == "Kept(samples=3)", there.stderr
