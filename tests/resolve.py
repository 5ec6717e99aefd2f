"""Resolves many command lines in the real host, as on a machine with eight H200, and prints what came out.

There is no such machine here. What the host reads of one while it resolves arguments is stood in for, after
its modules were imported: that CUDA is there, capability, count, name and memory. Nothing runs on the device.

One group of cases is a fork that loads SGLang's plugins as a launching process does. A file has
``{name: {"env": {...}, "cases": [argv, ...]}}``; standard output: the same names with one result
per case: ``backend``, ``bs``, ``max_bs``, ``decode``, ``mem`` and ``log``, or ``error`` and ``status``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132)


def stand_in() -> None:
    """Answer as a machine with eight H200 would."""
    import torch
    from sglang.srt.utils import common

    answers = {
        "is_available": True, "device_count": 8, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": H200, "get_device_name": H200.name, "mem_get_info": (140 << 30, 141 << 30),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    common.is_cuda.cache_clear()
    assert common.is_cuda()


class Lines(logging.Handler):
    """Keeps what the plugin logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def resolve(argv: list[str], lines: Lines) -> dict[str, Any]:
    """The prefill graphs of one command line."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    lines.lines = []
    before = dict(os.environ)
    try:
        args = prepare_server_args([*argv, "--skip-tokenizer-init", "--load-format", "dummy"])
        if hasattr(args, "resolve_once"):
            args.resolve_once()
    except (Exception, SystemExit) as error:  # the result of this case, whatever it is
        return {"error": str(error), "status": getattr(error, "code", None), "kind": type(error).__name__, "log": lines.lines}
    finally:
        os.environ.clear()
        os.environ.update(before)
    view = resolved_view(args)
    if view.cuda_graph_config is None:
        return {"backend": None, "log": lines.lines}
    phase = view.cuda_graph_config.prefill
    return {
        "backend": phase.backend, "bs": phase.bs, "max_bs": phase.max_bs, "log": lines.lines,
        "decode": view.cuda_graph_config.decode.backend, "mem": view.mem_fraction_static,
    }  # fmt: skip


def group(order: dict[str, Any]) -> list[dict[str, Any]]:
    """All cases of one group, in this process."""
    from sglang.srt.plugins import load_plugins

    os.environ.update(order["env"])
    lines = Lines()
    logging.getLogger("sglang_bcg_dsa").addHandler(lines)
    logging.getLogger("sglang_bcg_dsa").setLevel(logging.INFO)
    load_plugins()
    with contextlib.redirect_stdout(io.StringIO()):
        return [resolve(argv, lines) for argv in order["cases"]]


def main(groups: str) -> None:
    """Fork once for each group of the file ``groups``, in a process that has imported what the host's command line has."""
    # What resolution imports on its way and what would then look for CUDA's own library.
    late = ("srt.configs.model_config", "srt.arg_groups.pipeline", "srt.arg_groups.expert_pack_hook")
    for name in late:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"sglang.{name}")
    stand_in()
    results = {}
    for name, cases in json.loads(Path(groups).read_text()).items():
        with tempfile.TemporaryFile("w+") as file:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    json.dump(group(cases), file)
                    file.flush()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0, name
            file.seek(0)
            results[name] = json.load(file)
    print("RESULT" + json.dumps(results))
