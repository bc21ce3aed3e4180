"""Names, plugins and settings: what the command line writes becomes a component, and back."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import POLICIES
from support.run_cli import environment

from arbor import components, registry
from arbor.components import build, settings_of, spec_of
from arbor.controllers.mcts import MCTS
from arbor.errors import UnknownName, UsageError
from arbor.registry import BUILTIN, KINDS, names, resolve
from arbor.retention.allocators.lru import LRU
from arbor.retention.policy import Policy, Protect

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
    derived: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UsageError("setting-range", f"width={self.width}: it must be at least 1.")


@dataclass(frozen=True)
class Needs:
    """Has a setting without a default."""

    size: int


class Plain:
    """Not a dataclass."""


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


def test_names_are_sorted_and_import_nothing() -> None:
    code = (
        "import sys; from arbor import registry\n"
        "print([registry.names(kind) for kind in registry.KINDS])\n"
        "assert not any(m in sys.modules for m in ('torch', 'numpy', 'arbor.tree')), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert names("controller") == tuple(sorted(BUILTIN["controller"]))
    assert {"beam", "chain", "mcts", "tot"} <= set(names("controller"))


def test_an_unknown_name_says_the_nearest_one() -> None:
    with pytest.raises(UnknownName) as caught:
        resolve("task", "gam24")

    assert caught.value.code == "unknown-task"
    assert "Did you mean 'game24'?" in str(caught.value)


def test_an_unknown_kind_is_named() -> None:
    for call in (lambda: names("tasks"), lambda: build("tasks", Sample())):
        with pytest.raises(UnknownName, match="Did you mean 'task'"):
            call()


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
    ],
)
def test_a_setting_is_read_by_its_type(setting: str, written: Any, value: Any) -> None:
    for spec in (Sample, Sample()):
        built = build("task", spec, **{setting: written})

        assert getattr(built, setting) == value
        assert type(getattr(built, setting)) is type(value)


@pytest.mark.parametrize(
    ("setting", "written", "wanted"),
    [
        ("width", "four", "a whole number"),
        ("width", "1.5", "a whole number"),
        ("width", 1.5, "a whole number"),
        ("width", True, "a whole number"),
        ("width", None, "a whole number"),
        ("width", "inf", "a whole number"),
        ("width", float("inf"), "a whole number"),
        ("size", "five", "a whole number"),
        ("share", "half", "a number"),
        ("share", True, "a number"),
        ("on", "maybe", "true or false"),
        ("on", 2, "true or false"),
        ("on", [], "true or false"),
        ("share", None, "a number"),
        ("limit", [], "int or none"),
        ("mode", "mcts", "one of bfs, dfs, 3"),
        ("limit", "many", "int or none"),
        ("label", 7, "text"),
        ("pair", "1", "2 values"),
        ("pair", "[1, 2", "a JSON list"),
        ("pair", "a,b", "a whole number"),
        ("stops", 3, "a list"),
        ("colour", "green", "one of red, blue"),
    ],
)
def test_a_setting_that_cannot_be_read_says_what_it_must_be(
    setting: str, written: Any, wanted: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build("task", Sample, **{setting: written})

    assert caught.value.code == "setting-type"
    assert f"Sample.{setting}=" in caught.value.message
    assert wanted in caught.value.message
    json.dumps(caught.value.to_dict())


def test_an_unknown_setting_says_the_nearest_one_and_all_there_are() -> None:
    for spec in (Sample, Sample()):
        with pytest.raises(UsageError) as caught:
            build("task", spec, widht="4")

        assert caught.value.code == "unknown-setting"
        assert "Did you mean 'width'?" in caught.value.hint
        assert "stops" in caught.value.hint and "derived" not in caught.value.hint


def test_a_component_refuses_a_setting_itself() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        build("task", Sample, width="0")


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(UsageError, match="needs a value for 'size'"):
        build("task", Needs)
    assert build("task", Needs, size="3") == Needs(3)


def test_a_ready_component_is_used_as_it_is_and_changed_by_settings() -> None:
    ready = Sample(width=9)

    assert build("task", ready) is ready
    assert build("task", ready, share="0.1") == Sample(width=9, share=0.1)
    plain = Plain()
    assert build("task", plain) is plain
    with pytest.raises(UsageError, match="no setting 'width'"):
        build("task", plain, width=1)


def test_a_table_needs_a_name() -> None:
    with pytest.raises(UsageError, match="needs a 'name'"):
        build("task", {"width": 3})


@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_takes_nan(kind: str) -> None:
    for name in names(kind):
        known = resolve(kind, name)
        hints = get_type_hints(known if isinstance(known, type) else type(known))
        for setting in settings_of(known):
            hint = hints.get(setting)
            if float in (hint, *get_args(hint)) and str not in get_args(hint):
                for value in ("nan", math.nan):
                    with pytest.raises(UsageError, match=setting):
                        build(kind, name, **{setting: value})


def test_nor_has_a_ready_component_one() -> None:
    with pytest.raises(UsageError, match=r"mcts.first_play=nan: it must be a number"):
        build("controller", MCTS(first_play=math.nan))
    assert build("controller", MCTS(first_play=math.inf)).first_play == math.inf


samples = st.builds(
    Sample,
    width=st.integers(1, 99),
    share=st.floats(allow_nan=False),
    label=st.text(),
    on=st.booleans(),
    mode=st.sampled_from(["bfs", "dfs", 3]),
    limit=st.none() | st.integers(),
    text=st.none() | st.text().filter(lambda text: text.lower() != "none"),
    pair=st.tuples(st.integers(), st.integers()),
    stops=st.lists(st.text()).map(tuple),
    sizes=st.lists(st.integers()),
    colour=st.sampled_from(Colour),
    inner=st.builds(Inner, st.integers()),
)


@given(samples)
def test_a_component_survives_the_way_through_json(sample: Sample) -> None:
    spec = json.loads(json.dumps(spec_of(sample), allow_nan=False))
    del spec["name"]

    assert build("task", Sample, **spec) == sample


def test_a_class_without_a_name_goes_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "extra_a.py").write_text(textwrap.dedent(EXTRA))
    monkeypatch.syspath_prepend(tmp_path)

    mine = build("controller", "extra_a:Mine", speed="5")

    assert spec_of(mine) == {"name": "extra_a:Mine", "speed": 5}
    assert build("controller", spec_of(mine)) == mine
    assert spec_of(Plain())["name"].endswith(":Plain")


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


def test_an_unknown_name_says_which_plugins_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(kind: str, name: str) -> str:
        with pytest.raises(UnknownName) as caught:
            resolve(kind, name)
        return str(caught.value)

    assert said("policy", "lruu").endswith(", vatp (plugins loaded: none).")
    points = "[arbor.policies]\nmine = extra_g:Mine\nother = extra_g:Mine\n"
    install(tmp_path, "plug", points, {"extra_g": EXTRA})
    monkeypatch.syspath_prepend(tmp_path)
    registry._installed.cache_clear()

    assert said("policy", "mein").endswith("(plugins loaded: mine, other).")
    assert "Did you mean 'mine'? " in said("policy", "mein")
    assert said("task", "x").endswith("(plugins loaded: none).")
    monkeypatch.setenv("ARBOR_PLUGINS", "mine")
    assert said("policy", "othr").endswith("(plugins loaded: mine; ARBOR_PLUGINS=mine).")
    monkeypatch.setenv("ARBOR_PLUGINS", "off")
    assert said("policy", "mien").endswith("(plugins loaded: none; ARBOR_PLUGINS=off).")
    with pytest.raises(UnknownName) as caught:
        names("polcy")
    assert "plugins" not in str(caught.value), "no plugin adds a kind"


def test_a_plugin_that_cannot_be_imported_fails_only_who_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "plug",
        "[arbor.tasks]\nboom = extra_c_boom:Nothing\nfunction = extra_c:mine\n",
        {"extra_c_boom": "raise OSError('no disk')", "extra_c": "def mine(): ..."},
    )
    monkeypatch.syspath_prepend(tmp_path)

    assert "boom" in names("task")
    with pytest.raises(UsageError, match="OSError: no disk") as caught:
        resolve("task", "boom")
    assert caught.value.code == "task-broken"
    with pytest.raises(UsageError, match="neither a class nor a ready component"):
        resolve("task", "function")
    assert resolve("task", "game24")


def test_a_plugin_with_a_malformed_entry_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "plug",
        "[arbor.tasks]\nbad = extra_module_only\ngood = extra_d:Mine\n",
        {"extra_d": EXTRA},
    )
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.warns(RuntimeWarning, match="'plug/bad' is left out") as caught:
        assert "good" in names("task")
        assert "bad" not in names("task")

    assert len(caught) == 1


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


def test_the_environment_hides_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path,
        "plug",
        "[arbor.tasks]\none = extra_g:Mine\ntwo = extra_g:Mine\n",
        {"extra_g": EXTRA},
    )
    monkeypatch.syspath_prepend(tmp_path)

    for allowed, seen in (
        ("off", ()),
        ("two", ("two",)),
        ("plug/one, two", ("one", "two")),
        ("", ("one", "two")),
    ):
        monkeypatch.setenv("ARBOR_PLUGINS", allowed)
        assert names("task")[len(BUILTIN["task"]) :] == seen


def test_a_setting_called_name_is_refused() -> None:
    @dataclass(frozen=True)
    class Named:
        name: str = "x"

    with pytest.raises(UsageError, match="names the component"):
        build("task", Named)


def test_a_part_is_read_from_a_table() -> None:
    assert build("controller", Sample, inner='{"depth": 5}').inner == Inner(5)
    assert build("controller", Sample, inner={"depth": 5}).inner == Inner(5)
    for text in ("5", "deep", "[1]"):
        with pytest.raises(UsageError, match=r"inner=.*must be a table"):
            build("controller", Sample, inner=text)


class Part(Protocol):
    depth: int


@dataclass(frozen=True)
class Composed:
    part: Part = field(default_factory=Inner)


def test_a_part_behind_a_protocol_is_built_as_its_default_is() -> None:
    composed = Composed(Inner(7))

    assert build("controller", Composed, **{"part": spec_of(composed)["part"]}) == composed
    assert build("controller", composed, part=Inner(2)) == Composed(Inner(2))


# Names of one's own


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> registry.Register:
    """An empty table of registered names, for one test."""
    register = registry.Register()
    monkeypatch.setattr(registry, "register", register)
    return register


def test_a_decorator_gives_a_class_a_name(own: registry.Register) -> None:
    named = own.controller("mine")(Sample)

    assert named is Sample
    assert resolve("controller", "mine") is Sample
    assert names("controller")[-1] == "mine" and "mine" not in names("verifier")
    component = build("controller", "mine", width="7")
    assert spec_of(component)["name"] == "mine"
    assert build("controller", spec_of(component)) == component


def test_a_name_that_is_taken_stays_with_its_owner(own: registry.Register) -> None:
    own.verifier("mine")(Sample)
    own.verifier("mine")(Sample)  # a notebook's cell, run again

    with pytest.raises(UsageError, match="verifier name 'mine' is taken"):
        own.verifier("mine")(Needs)
    with pytest.raises(UsageError, match="Choose another name, such as 'my-tot'"):
        own.controller("tot")(Sample)
    with pytest.raises(UsageError, match="invalid controller name 'a:b'"):
        own.controller("a:b")(Sample)
    assert resolve("verifier", "mine") is Sample


def test_a_ready_component_is_given_a_name(own: registry.Register) -> None:
    wide = own.controller("wide", Sample(width=9))
    component = build("controller", "wide", share="0.25")

    assert resolve("controller", "wide") is wide == Sample(width=9)
    assert names("controller")[-1] == "wide"
    assert component == Sample(width=9, share=0.25)
    with pytest.raises(UsageError, match="'wide' has no setting 'widht'"):
        build("controller", "wide", widht=1)
    assert own.controller("wide", Sample(width=8)) == Sample(width=8), "a notebook's cell, edited"
    with pytest.raises(UsageError, match="is taken"):
        own.controller("wide", Inner())
    with pytest.raises(UsageError, match="is taken"):
        own.controller("wide", Sample)


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
    assert components.settings_of(named)[:12] == (
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
        "reserve",
    )
    assert own.policy("lowest", Policy(Lowest())).protect == Protect(), "a notebook's cell, edited"
    with pytest.raises(UsageError, match="is taken"):
        own.policy("lowest", Policy(LRU()))
    with pytest.raises(UsageError, match="no setting 'registered_as'"):
        build("policy", "lowest", registered_as="other")


def test_a_policy_without_a_name_is_built_again_from_the_classes_of_its_parts() -> None:
    spec = json.loads(json.dumps(spec_of(LOWEST)))

    assert spec["name"] == "arbor.retention.policy:Policy"
    assert spec["allocator"] == {"name": f"{__name__}:Lowest", "reserve": 0}
    assert build("policy", spec) == LOWEST
    assert build("policy", LOWEST, reserve="1", tail="4") == Policy(
        Lowest(1), protect=Protect(tail=4)
    )
    plain = build("policy", spec["name"], allocator="kkt", gamma="3")
    assert (type(plain.allocator).__name__, plain.allocator.gamma) == ("KKT", 3.0)
    with pytest.raises(UsageError, match="needs a value for 'allocator'"):
        build("policy", spec["name"])


def test_a_policy_goes_by_its_path_or_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "plug",
        f"[arbor.policies]\nlowest = {__name__}:LOWEST\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lowest", f"{__name__}:LOWEST"):
        policy = build("policy", f"{name},tail=5")

        assert policy.name == name == spec_of(policy)["name"]
        assert policy.protect == Protect(tail=5)
        assert build("policy", json.loads(json.dumps(spec_of(policy)))) == policy


def test_a_part_that_is_not_a_dataclass_goes_by_its_class() -> None:
    class_path = f"{__name__}:Plain"
    policy = Policy(Plain())  # type: ignore[arg-type]

    assert spec_of(policy)["allocator"] == {"name": class_path}
    assert type(build("policy", spec_of(policy)).allocator) is Plain


def test_an_earlier_name_is_still_read() -> None:
    policy = build("policy", "arborkv,scorer=chance")

    assert policy == build("policy", "arborkv", scorer={"name": "chance", "seed": 0})
    assert spec_of(policy)["scorer"] == {"name": "random", "seed": 0}
    assert "chance" not in names("scorer")


def test_what_is_no_kind_cannot_be_registered(own: registry.Register) -> None:
    with pytest.raises(AttributeError, match="kinds are controller, "):
        own.planet("mars")


def test_a_component_is_summed_up_in_a_line() -> None:
    assert components.summary_of(Plain) == "Not a dataclass."
    assert components.summary_of(Sample()) == "Has a setting of every kind a component may have."
    assert components.summary_of(resolve("policy", "h2o")).endswith("(H2O).")
    assert components.summary_of(LOWEST) == ""


def test_the_defaults_of_a_component_are_its_settings() -> None:
    assert components.defaults_of(Needs) == {"size": "?"}
    assert components.defaults_of(Composed) == {"part": Inner(2)}
    assert components.defaults_of(Inner(7)) == {"depth": 7}
    assert components.defaults_of(Plain) == {}
    assert list(components.defaults_of(LOWEST)) == [
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
    ]


def test_flat_defaults_have_the_settings_of_parts() -> None:
    assert components.flat_defaults_of(Needs) == {"size": "?"}
    assert components.flat_defaults_of(Composed) == {"depth": 2}
    assert components.flat_defaults_of(resolve("policy", "random")) == {
        "allocator": "pooled",
        "scorer": "random",
        "seed": 0,
        "sinks": 4,
        "recent": 8,
        "tail": 0,
        "floor": 0,
        "threshold": 0.0001,
        "spares_paths": False,
        "among": "together",
        "every": 1,
        "above": 1.0,
        "spare": 0,
        "prompt": False,
        "granularity": "token",
        "heads": "equal",
        "safeguard": 0.2,
        "beta": 20.0,
        "idle": "scored",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        (0.5, "0.5"),
        ("bfs", "bfs"),
        ([10, 99], "10,99"),
        ([], "[]"),
        (["a b", "\n"], '["a b","\\n"]'),
        ({"a": 1}, '{"a":1}'),
    ],
)
def test_a_setting_is_written_as_it_is_read(value: object, text: str) -> None:
    assert components.setting_text(value) == text


def test_every_kind_has_a_plural() -> None:
    assert [registry.plural(kind) for kind in ("policy", "task")] == ["policies", "tasks"]


def test_a_part_of_another_class_is_recorded_and_built_again() -> None:
    tails = build("policy", "arborkv", scorer="recency", eta=1)
    spec = spec_of(tails)

    assert spec["scorer"] == {"name": "recency"}
    assert spec["allocator"]["eta"] == 1.0
    assert build("policy", spec) == tails != build("policy", "arborkv", eta=1)
    assert "name" not in spec_of(build("policy", "arborkv"))["scorer"]


def test_a_part_is_named_and_then_set() -> None:
    policy = build("policy", "arborkv", allocator="kkt", gamma=3, scorer={"name": "heavy"})

    assert spec_of(policy)["allocator"]["name"] == "kkt"
    assert policy.allocator.gamma == 3
    assert policy.scorer == build("policy", "arborkv").scorer
    with pytest.raises(UsageError, match=r"has no setting 'eta'\. Did you mean '(?!eta)"):
        build("policy", "arborkv", allocator="kkt", eta=1)
    with pytest.raises(UnknownName, match="Did you mean 'recency'") as caught:
        build("policy", "arborkv", scorer="recncy")
    assert caught.value.code == "unknown-scorer"


def test_a_name_with_settings_is_built_as_such() -> None:
    assert components.split_spec("tot") == ("tot", {})
    assert components.split_spec(" a:B , x = 1, 2 ,y=z") == ("a:B", {"x": "1,2", "y": "z"})
    policy = components.build("policy", "arborkv,scorer=recency,tail=16", tail="5")
    assert (type(policy.scorer).__name__, policy.protect.tail) == ("Recency", 16)
    with pytest.raises(UsageError, match="twice"):
        components.split_spec("lru,tail=1,tail=2")
    with pytest.raises(UsageError, match="'tail' is not KEY=VALUE"):
        components.build("policy", "lru,tail")


# Files and modules of the working directory

OWN = {
    "controller": "from dataclasses import dataclass\nfrom arbor.controllers.chain import Chain\n\n\n"
    "@dataclass(frozen=True)\nclass Mine(Chain):\n    extra: int = 1\n",
    "verifier": "from arbor.verifiers.exact import Exact\n\n\nclass Mine(Exact):\n    pass\n",
    "task": "from arbor.tasks.game24 import Game24\n\n\nclass Mine(Game24):\n    pass\n",
    "policy": "from arbor.retention.policy import POLICIES\n\nMine = POLICIES['lru']\n",
    "aggregate": "from arbor.aggregate.best import Best\n\n\nclass Mine(Best):\n    pass\n",
    "backend": "from arbor.kernels.attention.torch_cascade import TorchCascade as Mine\n",
}


@pytest.mark.parametrize("form", ["{0}.py:Mine", "./{0}.py:Mine", "{0}:Mine", "{1}/{0}.py:Mine"])
def test_a_component_of_the_working_directory_is_found(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    (tmp_path / "own_controller.py").write_text(OWN["controller"])

    built = build("controller", form.format("own_controller", tmp_path), extra=7)
    spec = spec_of(built)
    sys.modules.pop("own_controller", None)

    assert built.extra == 7
    assert type(build("controller", spec.pop("name"), **spec)).__name__ == "Mine"


@pytest.mark.parametrize("kind", sorted(OWN))
def test_every_kind_of_component_goes_by_its_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"{kind}_of_mine.py"
    file.write_text(OWN[kind])

    found = resolve(kind, f"{file.name}:Mine")

    assert resolve(kind, registry.name_of(found)) in (found, type(found))


def test_a_file_without_a_name_is_told_how_it_goes() -> None:
    with pytest.raises(UnknownName, match=r"goes by both names, as in mine\.py:NAME"):
        resolve("policy", "mine.py")


def test_a_file_imports_what_lies_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "part_of_mine.py").write_text(OWN["policy"])
    (folder / "mine.py").write_text("from part_of_mine import Mine\n")

    found = resolve("policy", f"{folder}/mine.py:Mine")
    sys.modules.pop("part_of_mine")

    assert found.allocator == POLICIES["lru"].allocator


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


def test_the_command_takes_a_component_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN["policy"])
    script = "import sys; sys.path = sys.path[1:]; from arbor.cli import main; sys.exit(main())"
    for name in ("mine.py:Mine", "mine:Mine"):
        done = subprocess.run(
            [sys.executable, "-c", script, "solve", "4 5 6 10", "--policy", name, "--dry-run"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
