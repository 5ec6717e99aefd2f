"""A process that has imported the host, and forks itself for each command line it is given.

Importing SGLang takes 8 s and a suite starts it dozens of times. Each case is a fresh fork: the
host's modules are loaded as they are when its own command line starts, no plugin is. Loaded as well,
which is half the time of a case, are the libraries that a scheduler imports, whose names go into a
file for ``tests/preload``; and the syntax trees that the seams are looked up in. One case is a
line of JSON on standard input: ``{"argv", "env", "path", "code"}``; the answer is one line of JSON:
``{"returncode", "stdout", "stderr"}``.

Arguments: the folder of a model, and the file for the names.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from itertools import accumulate
from pathlib import Path

NOT_LIBRARIES = frozenset({"__main__", "sglang", "sgl_kernel", "deep_ep", "sglang_bcg_dsa", "tests", "sitecustomize"})
"""The host, this package, and what stands in for a kernel library where the test says so."""

RESULT = """
def run_server(server_args, *args, **kwargs):
    import json, os, sys
    from sglang_bcg_dsa import activate
    plan = activate._active
    print("RESULT", json.dumps({
        "asked": os.environ.get("SGLANG_BCG_DSA"), "active": plan is not None,
        "stall": plan and plan.config.audit.stall_seconds, "model": server_args.model_path}))
    sys.stdout.flush()
    os._exit(0)
"""


def case(argv: list[str], code: str) -> None:
    """What the forked process does: the host's own command line, up to the start of its server."""
    if code:
        exec(compile(code, "case", "exec"), {})
        return
    import sglang.launch_server as launch

    scope: dict[str, object] = {}
    exec(RESULT, scope)
    launch.run_server = scope["run_server"]
    if argv[0] == "serve":
        from sglang.cli import main as cli

        sys.argv = ["sglang", *argv]
        cli.main()
        return
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    launch.run_server(prepare_server_args(argv[1:]))


def run(order: dict[str, object]) -> dict[str, object]:
    """Fork for one case and wait for it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.environ.update(order["env"])  # type: ignore[call-overload]
                sys.path[:0] = order["path"]  # type: ignore[misc]
                importlib.invalidate_caches()
                case(order["argv"], order["code"])  # type: ignore[arg-type]
                status = 0
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
                if isinstance(error.code, str):
                    print(error.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {"returncode": os.waitstatus_to_exitcode(status), "stdout": texts[0], "stderr": texts[1]}


def warm(model: str) -> None:
    """Resolve one command line, so that what the host imports on the way is imported before the forks."""
    before = dict(os.environ)
    from sglang.srt.server_args import prepare_server_args

    prepare_server_args(["--model-path", model, "--device", "cpu", "--skip-tokenizer-init", "--load-format", "dummy"])
    os.environ.clear()
    os.environ.update(before)


def libraries() -> str:
    """Names of the modules, other than the host's, that a scheduler and a server's front import; imported in a fork.

    A package that cannot be imported leaves modules behind; they are not meant.
    """
    with tempfile.TemporaryFile("w+") as file:
        if (pid := os.fork()) == 0:
            import sglang.srt.entrypoints.http_server
            import sglang.srt.managers.scheduler  # noqa: F401

            for name, module in list(sys.modules.items()):
                spec = getattr(module, "__spec__", None)
                plain = isinstance(getattr(spec, "loader", None), ExtensionFileLoader | SourceFileLoader) and spec.name == name
                whole = all(package in sys.modules for package in accumulate(name.split("."), "{}.{}".format))
                if plain and whole and name.partition(".")[0] not in NOT_LIBRARIES:
                    file.write(name + "\n")
            file.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, "the host's scheduler cannot be imported"
        file.seek(0)
        return file.read()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    gc.disable()
    import sglang.cli.main
    import sglang.launch_server
    import sglang.srt.plugins
    import sglang.srt.server_args

    with contextlib.suppress(ImportError):
        import sglang.cli.serve  # noqa: F401
    warm(sys.argv[1])
    names = libraries()
    for library in names.split():
        importlib.import_module(library)
    Path(sys.argv[2]).write_text(names)
    from sglang_bcg_dsa.seams import examine

    examine()
    gc.freeze()  # a collection in a fork would copy what it only looks at
    gc.enable()
    print("READY", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
