"""The overlay in every process of a real server: what each one has imported, as it says itself."""

import json
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from sglang_deepep_v2 import overlay
from sglang_deepep_v2.ab.checkpoints import CheckpointSpec, ensure_checkpoint
from sglang_deepep_v2.ab.paths import PATHS
from sglang_deepep_v2.ab.servers import Fleet, ServeSettings

pytestmark = pytest.mark.loader

# Runs at each interpreter's start; writes the files of the overlaid modules whenever that set grows.
REPORTER = """
    import json, os, sys, threading, time
    def report():
        names, written = json.loads(os.environ["OVERLAY_NAMES"]), 0
        target = os.path.join(os.environ["OVERLAY_REPORTS"], str(os.getpid()))
        while True:
            files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
            files = {name: file for name, file in files.items() if file}
            if len(files) != written:
                written = len(files)
                with open(target + ".draft", "w") as draft:
                    json.dump(files, draft)
                os.replace(target + ".draft", target)
            time.sleep(0.1)
    threading.Thread(target=report, daemon=True).start()
    """
EVERYWHERE = {"sglang.srt.environ"}
IN_SCHEDULERS = EVERYWHERE | {
    "sglang.srt.layers.moe.ep_moe.kernels",
    "sglang.srt.layers.moe.moe_runner.deep_gemm",
    "sglang.srt.layers.moe.token_dispatcher.deepep_v2",
    "sglang.srt.model_executor.model_runner_components.moe_ep_setup",
}


def read_reports(folder: Path) -> dict[int, dict[str, str]]:
    return {int(file.name): json.loads(file.read_text()) for file in folder.iterdir() if file.suffix == ""}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_process_of_a_server_runs_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hook, reports = tmp_path / "hook", tmp_path / "reports"
    hook.mkdir()
    reports.mkdir()
    (hook / "sitecustomize.py").write_text(dedent(REPORTER))
    monkeypatch.setenv("OVERLAY_REPORTS", str(reports))
    monkeypatch.setenv("OVERLAY_NAMES", json.dumps([*overlay.modules()]))
    spec = CheckpointSpec("tiny", "Qwen3MoeForCausalLM", layers=1)
    model = ensure_checkpoint(spec, tmp_path)
    settings = ServeSettings(str(model), tp=2, chunk=64, cpu=True, pythonpath=(str(hook),), ready_timeout_s=400)
    with Fleet().run_server(PATHS["psum"], settings, tmp_path / "server.log") as server:
        body = {"input_ids": [[11, 12, 13, 14]], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        (answer,) = server.post("/generate", body, timeout_s=150)
        assert len(answer["output_ids"]) == 1
        time.sleep(0.5)
        main = psutil.Process(server.process.pid)
        titles = {process.pid: process.cmdline()[0] for process in main.children(recursive=True)}
        found = read_reports(reports)
    schedulers = {pid for pid, title in titles.items() if "scheduler" in title}
    detokenizer = {pid for pid, title in titles.items() if "detokenizer" in title}
    assert (len(schedulers), len(detokenizer)) == (2, 1), titles
    for pid in {main.pid} | schedulers | detokenizer:
        assert (IN_SCHEDULERS if pid in schedulers else EVERYWHERE) <= set(found[pid]), (pid, titles)
    # No process of the server, helper processes included, has such a module from anywhere else.
    tree = {name: str(module.file) for name, module in overlay.modules().items()}
    for pid, files in found.items():
        assert files == {name: tree[name] for name in files}, (pid, titles)
