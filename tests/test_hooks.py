"""pluggy: specs, builtin features as plugins, third-party plugins, and misspellings rejected by name."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_bcg_dsa import hookimpl
from sglang_bcg_dsa.activate import plan
from sglang_bcg_dsa.config import FEATURES, Config
from sglang_bcg_dsa.errors import PluginError
from sglang_bcg_dsa.hooks import specs
from sglang_bcg_dsa.hooks.manager import PREFIX, add, build_manager, declared_reasons
from tests.conftest import PACKAGE, ROOT, Run, Zygote

SPECS = {n: f for n, f in vars(specs).items() if n.startswith(PREFIX)}


def test_our_features_are_plugins_of_the_same_specs() -> None:
    """Builtin features have no door of their own: each is registered, and answers bcg_feature."""
    manager = plan(Config()).manager
    assert {"vote", "explain", "audit", "rules"} <= {name for name, _ in manager.list_name_plugin()}
    for name in ("vote", "explain", "audit"):
        plugin = manager.get_plugin(name)
        assert {"bcg_feature", "bcg_install"} <= {c.name for c in manager.get_hookcallers(plugin) or ()}


def test_every_spec_is_documented_and_used() -> None:
    """A hook without a docstring, or that nothing calls, is a promise nobody keeps."""
    source = "\n".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "specs.py")
    for name, spec in SPECS.items():
        assert inspect.getdoc(spec), name
        assert f"hook.{name}" in source or f"hooks.{name}" in source, f"{name} is never called"


def test_the_readme_has_every_spec_with_its_arguments() -> None:
    """Documentation that cannot drift from the specs."""
    readme = (ROOT / "README.md").read_text()
    for name, spec in SPECS.items():
        arguments = ", ".join(inspect.signature(spec).parameters)
        assert f"{name}({arguments})" in readme


def test_a_misspelt_hook_is_rejected_by_name() -> None:
    """pluggy alone ignores a hook it does not know; a veto that is never asked is worse than none."""

    class Theirs:
        @hookimpl
        def bcg_replay_vetto(self, batch: Any) -> None: ...

    with pytest.raises(PluginError) as caught:
        add(build_manager(), "theirs", Theirs())
    assert "'theirs'" in str(caught.value)
    assert "bcg_replay_vetto" in str(caught.value)
    assert "bcg_replay_veto" in str(caught.value)


def test_a_misspelt_argument_is_rejected_by_name() -> None:
    """An argument the spec does not have is named, with the plugin."""

    class Theirs:
        @hookimpl
        def bcg_replay_veto(self, bach: Any) -> None: ...

    with pytest.raises(PluginError) as caught:
        add(build_manager(), "theirs", Theirs())
    assert "'theirs'" in str(caught.value)
    assert "bach" in str(caught.value)


def test_a_plugin_is_registered_once() -> None:
    """The same name twice is an error, not the second one silently."""
    manager = build_manager()
    add(manager, "theirs", object())
    with pytest.raises(PluginError, match="'theirs'"):
        add(manager, "theirs", object())


def test_a_late_plugin_is_told_the_configuration() -> None:
    """bcg_configure is historic: whoever registers later is not left without."""
    told: list[Config] = []

    class Late:
        @hookimpl
        def bcg_configure(self, config: Config) -> None:
            told.append(config)

    manager = plan(Config()).manager
    add(manager, "late", Late())
    assert told == [Config()]


def test_reasons_are_collected_with_their_plugin() -> None:
    """Each declared reason is known by whom it is."""

    class Theirs:
        @hookimpl
        def bcg_reasons(self) -> list[str]:
            return ["busy", "hot"]

    manager = build_manager([("theirs", Theirs())])
    assert declared_reasons(manager) == [("theirs", "busy"), ("theirs", "hot")]


def distribution(folder: Path, module: str, code: str, name: str = "theirs") -> Path:
    """A third-party plugin as pip would install it."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang_bcg_dsa]\n{name} = {module}\n")
    (folder / f"{module.partition(':')[0]}.py").write_text(textwrap.dedent(code))
    return folder


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("from sglang_bcg_dsa import hookimpl\n@hookimpl\ndef bcg_verdit(verdict): ...\n", "bcg_verdit, which is no hook"),
        ("from sglang_bcg_dsa import hookimpl\n@hookimpl\ndef bcg_verdict(verdickt): ...\n", "verdickt"),
        ("import not_there\n", "cannot be imported: No module named 'not_there'"),
        ("from sglang_bcg_dsa import hookimpl\n@hookimpl\ndef bcg_reasons(): return ['padding']\n", "builtin reason 'padding'"),
        ("from sglang_bcg_dsa import hookimpl\n@hookimpl\ndef bcg_reasons(): return 'busy'\n", "returned text, 'busy'"),
        ("from sglang_bcg_dsa import hookimpl\n@hookimpl\ndef bcg_reasons(): 1 / 0\n", "bcg_reasons raised ZeroDivisionError"),
        ("def bcg_something_else(): ...\n", "bcg_something_else, which is no hook"),
        ("x = 1\n", "implements no hook"),
    ],
)  # fmt: skip
def test_an_installed_plugin_that_is_wrong_stops_the_start(tmp_path: Path, zygote: Zygote, code: str, words: str) -> None:
    """Found through its entry point, refused with its name, status 2 and no traceback."""
    distribution(tmp_path / "p", "their_module", code)
    done = zygote(
        code="from sglang_bcg_dsa.entry import register; register()", path=[tmp_path / "p"], env={"SGLANG_BCG_DSA": "1"}
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "'theirs'" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("asked", [True, False, "auto"])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_can_be_demanded_switched_off_or_left(feature: str, asked: bool | str) -> None:
    """``enabled = false`` switches off; what SGLang has itself is left to it; all else is active."""
    table = msgspec.structs.replace(getattr(Config(), feature), enabled=asked)
    ready = plan(msgspec.structs.replace(Config(), **{feature: table}))
    decided = {f.name: f for f in ready.features}[feature]
    if asked is False:
        assert decided.state.value == "off"
    elif feature == "attention":
        assert decided.state.value == ("extended" if "attention.native" in ready.seams else "supplied")
    elif feature == "moe":
        assert decided.state.value == ("native" if "moe.native" in ready.seams else "supplied")
    else:
        assert decided.active


def test_doctor_shows_plugins_with_their_hooks(tmp_path: Path, fresh: Run) -> None:
    """A plugin author sees that the plugin is found, and which hooks it really implements."""
    code = "from sglang_bcg_dsa import hookimpl\n@hookimpl\ndef bcg_verdict(verdict): ...\n"
    path = [distribution(tmp_path / "p", "their_module", code)]
    assert "theirs  bcg_verdict" in fresh(["-m", "sglang_bcg_dsa.cli", "doctor"], path=path).stdout
    report = json.loads(fresh(["-m", "sglang_bcg_dsa.cli", "doctor", "--json"], path=path).stdout)
    assert report["plugins"]["sglang_bcg_dsa"] == {"theirs": ["bcg_verdict"]}


@pytest.mark.parametrize(
    ("env", "status", "words"),
    [
        ({"SGLANG_PLUGINS": "other"}, 1, "shuts bcg_dsa out"),
        ({"SGLANG_SCHEDULER_SKIP_ALL_GATHER": "1"}, 1, "unset it"),
        ({"SGLANG_BCG_DSA_CONFIG": "/no/such.toml"}, 2, "no such file"),
        ({}, 0, None),
    ],
)
def test_doctor_refuses_what_a_start_would_refuse(fresh: Run, env: dict[str, str], status: int, words: str | None) -> None:
    """One check for both: what doctor lets pass starts, and its JSON says why not, also for bad input."""
    done = fresh(["-m", "sglang_bcg_dsa.cli", "doctor", "--json"], env=env)
    assert done.returncode == status, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is (status == 0)
    assert words is None or words in report["refusal"]
