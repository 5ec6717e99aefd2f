"""``--plugins`` and ``--bcg-dsa-config`` on the real host's command lines, and silence when not asked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, Zygote

MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
         "max_position_embeddings": 512, "torch_dtype": "float32"}  # fmt: skip

Result = dict[str, Any] | None
Launch = Callable[..., tuple[Result, subprocess.CompletedProcess[str]]]


@pytest.fixture
def launch(tmp_path: Path, zygote: Zygote) -> Launch:
    """Start the host with arguments; returns (what it resolved, or None; the completed process)."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    base = ["--model-path", str(model), "--device", "cpu", "--skip-tokenizer-init", "--load-format", "dummy"]

    def run(*args: str, how: str = "launch_server", **kwargs: Any) -> tuple[Result, subprocess.CompletedProcess[str]]:
        done = zygote(how, *base, *args, **kwargs)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        return (json.loads(lines[0][7:]) if lines else None), done

    return run


@pytest.mark.parametrize("how", ["serve", "launch_server"])
def test_the_flag_switches_it_on(launch: Launch, how: str) -> None:
    """Both command lines: named means active here, and published for every child."""
    result, done = launch("--plugins", "bcg_dsa", how=how)
    assert result, done.stderr[-3000:]
    assert (result["active"], result["asked"]) == (True, "1")


@pytest.mark.parametrize(
    "yaml", ["plugins: bcg_dsa\n", "plugins: [bcg_dsa]\n", "plugins: bcg_dsa,\n", "plugins: [bcg_dsa, bcg_dsa]\n"]
)
def test_the_flag_in_a_config_file(launch: Launch, tmp_path: Path, yaml: str) -> None:
    """SGLang's --config YAML takes the flag as a word or as a list."""
    (tmp_path / "c.yaml").write_text(yaml + "log-level: error\n")
    result, done = launch("--config", str(tmp_path / "c.yaml"))
    assert result, done.stderr[-3000:]
    assert result["active"]


def test_the_environment_switches_it_on(launch: Launch) -> None:
    """``SGLANG_BCG_DSA=1`` is for engines and tools that have no command line; it works with one too."""
    result, done = launch(env={"SGLANG_BCG_DSA": "1"})
    assert result, done.stderr[-3000:]
    assert result["active"]


def test_the_flag_wins_over_the_environment(launch: Launch, tmp_path: Path) -> None:
    """Flag over environment over file over default, for the switch and for the file."""
    (tmp_path / "flag.toml").write_text("[audit]\nstall_seconds = 11\n")
    (tmp_path / "env.toml").write_text("[audit]\nstall_seconds = 22\n")
    result, done = launch(
        "--plugins", "bcg_dsa", "--bcg-dsa-config", str(tmp_path / "flag.toml"),
        env={"SGLANG_BCG_DSA": "0", "SGLANG_BCG_DSA_CONFIG": str(tmp_path / "env.toml")},
    )  # fmt: skip
    assert result, done.stderr[-3000:]
    assert (result["active"], result["stall"]) == (True, 11)
    result, done = launch("--plugins", "bcg_dsa", env={"SGLANG_BCG_DSA_CONFIG": str(tmp_path / "env.toml")})
    assert result, done.stderr[-3000:]
    assert result["stall"] == 22


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (("--plugins", "bcg_dsq"), {}, ["'bcg_dsq' is not installed", "installed:", "bcg_dsa"]),
        (("--plugins", ""), {}, ["no plugin is named", "bcg_dsa"]),
        (("--plugins", ","), {}, ["no plugin is named"]),
        (("--plugins",), {}, ["expected at least one argument"]),
        (("--plugins", "bcg_dsa,nope"), {}, ["'nope' is not installed"]),
        (("--plugins", "bcg_dsa", "--bcg-dsa-config", "/no/such.toml"), {}, ["/no/such.toml", "no such file"]),
        (("--plugins", "bcg_dsa", "--bcg-dsa-config", ""), {}, ["no such file"]),
        (("--plugins", "bcg_dsa"), {"SGLANG_SCHEDULER_SKIP_ALL_GATHER": "1"}, ["SKIP_ALL_GATHER", "unset it"]),
        ((), {"SGLANG_BCG_DSA": "maybe"}, ["SGLANG_BCG_DSA='maybe'"]),
        ((), {"SGLANG_BCG_DSA": "1", "SGLANG_BCG_DSA_CONFIG": "/no/such.toml"}, ["/no/such.toml"]),
    ],
)
def test_bad_input_is_one_error(launch: Launch, args: tuple[str, ...], env: dict[str, str], words: list[str]) -> None:
    """Status 2, what and why, no traceback, nothing started."""
    result, done = launch(*args, env=env)
    assert result is None
    assert done.returncode == 2, done.stderr[-3000:]
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_without_the_plugin_is_an_error(launch: Launch, tmp_path: Path) -> None:
    """Settings for something that is off would be silently without effect."""
    (tmp_path / "c.toml").write_text("")
    result, done = launch("--bcg-dsa-config", str(tmp_path / "c.toml"))
    assert (result, done.returncode) == (None, 2)
    assert "--plugins bcg_dsa" in done.stderr


def test_a_plugin_that_sglang_shuts_out_cannot_be_named(launch: Launch, tmp_path: Path) -> None:
    """``--plugins`` does not change what SGLang loads; a name SGLANG_PLUGINS excludes is an error."""
    info = tmp_path / "p" / "other-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = json:loads\n")
    result, done = launch(
        "--plugins", "bcg_dsa,other", env={"SGLANG_PLUGINS": "bcg_dsa"}, path=[tmp_path / "p"]
    )
    assert (result, done.returncode) == (None, 2)
    assert "'other' is shut out by SGLANG_PLUGINS=bcg_dsa" in done.stderr


_ATTRIBUTES = """
import importlib, json, sys
from sglang_bcg_dsa.seams import SEAMS, examine, resolve_owner
fitting = examine()
for seam in SEAMS:
    if seam.key in fitting:
        importlib.import_module(fitting[seam.key].module)

def survey():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "sglang":
            for key, value in list(vars(module).items()):
                found[name + "." + key] = id(value)
                if isinstance(value, type) and value.__module__.partition(".")[0] == "sglang":
                    for k, v in list(vars(value).items()):
                        found[value.__module__ + "." + value.__qualname__ + "." + k] = id(v)
    return found

before = survey()
from sglang.srt.plugins import load_plugins
load_plugins()
after = survey()
ours = [m for m in sys.modules if m.startswith("sglang_bcg_dsa") and "seams" not in m and "source" not in m]
print("RESULT", json.dumps([sorted(k for k in after if before.get(k) != after[k]), sorted(ours)]))
"""


def test_not_asked_for_nothing_changes_but_the_flag(zygote: Zygote) -> None:
    """P6: in the launching process two methods of ServerArgs, and not one other attribute of the host."""
    done = zygote(code=_ATTRIBUTES)
    assert done.returncode == 0, done.stderr
    changed, ours = json.loads(next(s for s in done.stdout.splitlines() if s.startswith("RESULT"))[7:])
    changed = [c for c in changed if not c.startswith("sglang.srt.plugins.")]  # its own bookkeeping
    assert changed == [
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
    ]
    assert "sglang_bcg_dsa.activate" not in ours


def test_not_asked_for_a_child_is_left_alone(fresh: Run, tmp_path: Path) -> None:
    """A spawned child of a server that did not ask has no hook at all."""
    (tmp_path / "child.py").write_text(
        "import multiprocessing\n"
        "def look(q):\n"
        "    from sglang_bcg_dsa.entry import register\n"
        "    register()\n"
        "    import sys\n"
        "    q.put([m for m in sys.modules if m.startswith('sglang')])\n"
        "if __name__ == '__main__':\n"
        "    c = multiprocessing.get_context('spawn'); q = c.Queue(); p = c.Process(target=look, args=(q,)); p.start()\n"
        "    print(sorted(q.get())); p.join()\n"
    )
    done = fresh([str(tmp_path / "child.py")])
    assert done.stdout.strip() == str(
        ["sglang_bcg_dsa", "sglang_bcg_dsa.entry", "sglang_bcg_dsa.environment", "sglang_bcg_dsa.errors"]
    ), done.stderr


def test_the_entry_module_costs_nothing(fresh: Run) -> None:
    """P6: under 5 ms in a fresh interpreter (best of five), and neither torch, SGLang nor pluggy loaded."""
    code = (
        "import sys, time; t = time.perf_counter(); import sglang_bcg_dsa.entry; t = time.perf_counter() - t; "
        "print(t * 1e3, [m for m in ('torch', 'sglang', 'pluggy', 'msgspec', 'rich') if m in sys.modules])"
    )
    best = 1e9
    for _ in range(5):
        milliseconds, _, loaded = fresh(code).stdout.partition(" ")
        assert loaded.strip() == "[]"
        best = min(best, float(milliseconds))
    assert best < 5.0


def test_the_entry_point_is_in_the_metadata() -> None:
    """SGLang finds the plugin by its installed entry point, and nothing else of ours."""
    from importlib.metadata import entry_points

    ours = [e for e in entry_points(group="sglang.srt.plugins") if e.value.startswith("sglang_bcg_dsa")]
    assert [(e.name, e.value) for e in ours] == [("bcg_dsa", "sglang_bcg_dsa.entry:register")]
    assert not [e for e in entry_points(group="sglang.srt.platforms") if e.value.startswith("sglang_bcg_dsa")]
