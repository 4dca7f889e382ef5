"""Breaks the feature one line at a time and runs the tests that must notice; ``make mutants``.

Every mutant is applied to a copy of ``python/`` in a temporary folder that comes first on the path, so the working
files stay as they are. First the tests run against an unchanged copy: a test that fails there proves nothing.
Arguments choose mutants by parts of their names. Exits 1 when a mutant survives, 2 when the unchanged copy fails or a
mutant no longer fits its file.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = "python/sglang/srt"
TIMEOUT_S = 300
WORKERS = min(2, os.cpu_count() or 1)

HOOK = "arg_groups/moe_hook.py"
PREBUILD = "model_executor/moe_ep_setup.py"
COMPONENTS = "model_executor/model_runner_components/moe_ep_setup.py"
ENVIRON = "environ.py"
KERNELS = "layers/moe/ep_moe/kernels.py"
RUNNER = "layers/moe/moe_runner/deep_gemm.py"
DISPATCHER = "layers/moe/token_dispatcher/deepep_v2.py"
BUFFER = "layers/moe/token_dispatcher/elastic_buffer.py"
PSUM = "layers/deep_gemm_wrapper/psum.py"

KERNEL_TESTS = "test_kernels.py::"
BUDGET_TESTS = "test_token_budget.py::"
PREBUILD_TESTS = "test_prebuild.py::"
CONTRACT_TESTS = "test_dispatch_contract.py::"
RUNNER_TESTS = "test_runner_contract.py::"
BUFFER_TESTS = "test_buffer_facade.py::"


@dataclass(frozen=True)
class Mutant:
    """One line of one file, changed.

    Attributes:
        name: what is broken.
        file: path under ``python/sglang/srt``.
        before: text that occurs exactly once in the file.
        after: what replaces it.
        tests: pytest node ids under ``test/srt``.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Change the copy under ``root``. Raises ValueError when the mutant does not fit the file."""
        file = root / TREE / self.file
        source = file.read_text()
        if source.count(self.before) != 1:
            raise ValueError(
                f"{self.name}: {self.file} holds {source.count(self.before)} times, not once:\n{self.before}"
            )
        mutated = source.replace(self.before, self.after)
        ast.parse(mutated)
        file.write_text(mutated)

    def line(self) -> int:
        """The line of the unchanged file where the mutation starts."""
        source = (ROOT / TREE / self.file).read_text()
        return source[: source.find(self.before)].count("\n") + 1


MUTANTS = (
    Mutant(
        "label off by one expert",
        KERNELS,
        "label = tl.where(owner < NUM_EXPERTS, owner, -1)",
        "label = tl.where(owner < NUM_EXPERTS, owner + 1, -1)",
        (KERNEL_TESTS + "TestFillMIndices",),
    ),
    Mutant(
        "psum end taken as exclusive",
        KERNELS,
        "(_align_up(ends, ALIGN) <= first_row)",
        "(_align_up(ends, ALIGN) < first_row)",
        (KERNEL_TESTS + "TestFillMIndices",),
    ),
    Mutant(
        "capacity tail labelled as an expert",
        KERNELS,
        "label = tl.where(owner < NUM_EXPERTS, owner, -1)",
        "label = tl.minimum(owner, NUM_EXPERTS - 1)",
        (KERNEL_TESTS + "TestFillMIndices",),
    ),
    Mutant(
        "rows that do not divide by the alignment accepted",
        KERNELS,
        "    assert total_rows % expert_alignment == 0, (",
        "    assert True, (",
        (KERNEL_TESTS + "TestFillMIndices",),
    ),
    Mutant(
        "scale rows by the row-major stride",
        KERNELS,
        "at = x_ptr + row[:, None] * stride_row + col[None, :] * stride_col",
        "at = x_ptr + row[:, None] * cols + col[None, :]",
        (KERNEL_TESTS + "TestScaleExpandedRows",),
    ),
    Mutant(
        "row weights in the wrong order",
        KERNELS,
        "weight = tl.load(weight_ptr + row * stride_weight,",
        "weight = tl.load(weight_ptr + (rows - 1 - row) * stride_weight,",
        (KERNEL_TESTS + "TestScaleExpandedRows",),
    ),
    Mutant(
        "fused kernel: fold dropped",
        KERNELS,
        "scale = scale * weight[:, None]",
        "scale = scale * 1.0",
        (KERNEL_TESTS + "TestSwigluQuant::test_computes_weighted_swiglu",),
    ),
    Mutant(
        "fused kernel: fold twice",
        KERNELS,
        "if HAS_WEIGHT and UE8M0:",
        "if HAS_WEIGHT:",
        (KERNEL_TESTS + "TestSwigluQuant::test_computes_weighted_swiglu",),
    ),
    Mutant(
        "fused kernel: scale stride without the TMA padding",
        KERNELS,
        " " * 16 + "scale_at = row[:, None] + group[None, :].to(tl.int64) * stride_scale_group",
        " " * 16 + "scale_at = row[:, None] + group[None, :].to(tl.int64) * num_rows",
        (KERNEL_TESTS + "TestSwigluQuant::test_k7_rows_not_a_multiple_of_four",),
    ),
    Mutant(
        "fused kernel: gate and up swapped",
        KERNELS,
        "y = gate / (1.0 + tl.exp(-gate)) * up",
        "y = up / (1.0 + tl.exp(-up)) * gate",
        (KERNEL_TESTS + "TestSwigluBf16::test_equals_the_twin",),
    ),
    Mutant(
        "labels pipeline: fold dropped",
        RUNNER,
        "kernels.scale_expanded_rows_(down_scale, expanded.row_weights)",
        "pass",
        (RUNNER_TESTS + "test_rows_are_weighted_once",),
    ),
    Mutant(
        "labels pipeline: fold twice",
        RUNNER,
        "if not expanded.weighted:",
        "if True:",
        (RUNNER_TESTS + "test_rows_are_weighted_once",),
    ),
    Mutant(
        "psum pipeline: weights dropped",
        RUNNER,
        "activation = (gateup, expanded.row_weights, psum, expanded.expert_alignment)",
        "activation = (gateup, None, psum, expanded.expert_alignment)",
        (RUNNER_TESTS + "test_rows_are_weighted_once",),
    ),
    Mutant(
        "psum off by one",
        RUNNER,
        "psum = dispatch_output.psum_num_recv_tokens_per_expert\n",
        "psum = dispatch_output.psum_num_recv_tokens_per_expert - 1\n",
        (RUNNER_TESTS + "test_rows_are_weighted_once",),
    ),
    Mutant(
        "raw rows weighted although the caller wants none",
        RUNNER,
        "row_weights=None if runner_config.no_combine else dispatch_output.topk_weights",
        "row_weights=dispatch_output.topk_weights",
        (RUNNER_TESTS + "test_r7_raw_rows_stay_unweighted",),
    ),
    Mutant(
        "masked prefill",
        DISPATCHER,
        "use_masked = is_decode\n",
        "use_masked = is_decode or self._prefill_expand_enabled\n",
        (CONTRACT_TESTS + "test_layouts",),
    ),
    Mutant(
        "toggle ignored",
        DISPATCHER,
        "use_expand_layout = is_decode or self._prefill_expand_enabled",
        "use_expand_layout = True",
        (CONTRACT_TESTS + "test_layouts",),
    ),
    Mutant(
        "idle rank not padded",
        DISPATCHER,
        "self._pad_empty_combine = do_cpu_sync and local_tokens == 0",
        "self._pad_empty_combine = False",
        (CONTRACT_TESTS + "test_r2_idle_rank_joins_with_one_weightless_token",),
    ),
    Mutant(
        "dummy token's row returned",
        DISPATCHER,
        "return combined_x[:0] if self._pad_empty_combine else combined_x",
        "return combined_x",
        (CONTRACT_TESTS + "test_r2_idle_rank_joins_with_one_weightless_token",),
    ),
    Mutant(
        "capacity check dropped",
        DISPATCHER,
        "if hidden_states.shape[0] > self.num_max_dispatch_tokens_per_rank:",
        "if False:",
        (CONTRACT_TESTS + "test_r4_capacity_is_checked_first",),
    ),
    Mutant(
        "capacity taken from the batch",
        DISPATCHER,
        "num_max_tokens_per_rank=self.num_max_dispatch_tokens_per_rank,\n            expert",
        "num_max_tokens_per_rank=max(1, local_tokens),\n            expert",
        (CONTRACT_TESTS + "test_r4_collective_arguments_do_not_depend_on_the_batch",),
    ),
    Mutant(
        "handle not released",
        DISPATCHER,
        "        finally:\n            # A handle serves once, also when combine fails.\n            self._release()",
        "        finally:\n            pass",
        (CONTRACT_TESTS + "test_r1_a_handle_serves_once", CONTRACT_TESTS + "test_r1_one_dispatch_at_a_time"),
    ),
    Mutant(
        "second dispatch accepted",
        DISPATCHER,
        "        if self._handle is not None:",
        "        if False:",
        (CONTRACT_TESTS + "test_r1_a_handle_serves_once", CONTRACT_TESTS + "test_r1_one_dispatch_at_a_time"),
    ),
    Mutant(
        "buffer's key ignored",
        BUFFER,
        "return state.buffer if state.buffer is not None and state.key == key else None",
        "return state.buffer",
        (BUFFER_TESTS + "test_another_key_gets_another_buffer",),
    ),
    Mutant(
        "hybrid mode always",
        BUFFER,
        'return get_exec().moe.deepep_v2_mode == "hybrid"',
        "return True",
        (BUFFER_TESTS + "test_r10_hybrid_exactly_when_asked_for",),
    ),
    Mutant(
        "alignment of the GEMM ignored",
        PSUM,
        "if alignment != expert_alignment:",
        "if False:",
        (BUFFER_TESTS + "test_r6_psum_pipeline_needs_equal_alignments",),
    ),
    Mutant(
        "budget rounded down",
        HOOK,
        "return -(-value // divisor)",
        "return value // divisor",
        (BUDGET_TESTS + "test_r12_required_tokens",),
    ),
    Mutant(
        "budget without dynamic chunking",
        HOOK,
        "chunk_ceiling = max_prefill_buffer_tokens(server_args)",
        "chunk_ceiling = max(0, resolved_view(server_args).chunked_prefill_size)",
        (BUDGET_TESTS + "test_r12_dynamic_chunking",),
    ),
    Mutant(
        "budget divides by the whole TP group under DP attention",
        HOOK,
        "attn_dp_size=view.attn_dp_size\n",
        "attn_dp_size=1\n",
        (BUDGET_TESTS + "test_r12_required_tokens",),
    ),
    Mutant(
        "budget divides by zigzag CP ranks",
        HOOK,
        ' and view.cp_strategy == "interleave":',
        ":",
        (BUDGET_TESTS + "test_r12_required_tokens",),
    ),
    Mutant(
        "unpadded batches accepted",
        HOOK,
        "if view.disable_attn_tp_gather:",
        "if False:",
        (BUDGET_TESTS + "test_r12_disabled_gather_is_refused",),
    ),
    Mutant(
        "prebuild gate inverted",
        PREBUILD,
        "return not isinstance(decode_cuda_graph_runner, EagerRunner)",
        "return isinstance(decode_cuda_graph_runner, EagerRunner)",
        (PREBUILD_TESTS + "test_r11_builds_once_for_all_layers",),
    ),
    Mutant(
        "standing buffer built again",
        PREBUILD,
        "if dispatcher is None or dispatcher.buffer_is_built():",
        "if dispatcher is None:",
        (PREBUILD_TESTS + "test_r11_builds_once_for_all_layers",),
    ),
    Mutant(
        "prebuild never reached from ModelRunner",
        COMPONENTS,
        "    maybe_prebuild_deepep_v2_buffers(model=model)",
        "    return None",
        (PREBUILD_TESTS + "test_model_runner_calls_the_patch",),
    ),
    Mutant(
        "expanded prefill off by default",
        ENVIRON,
        "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND = EnvBool(True)",
        "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND = EnvBool(None)",
        ("test_environ.py::test_declaration",),
    ),
)


@dataclass(frozen=True)
class Verdict:
    """How one run of pytest ended: ``killed``, ``survived`` or ``broken`` (no test ran, or none could)."""

    status: str
    seconds: float
    detail: str


@contextmanager
def copy_of_tree():
    """A folder that holds a copy of ``python/``; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="deepep-v2-mutant-") as folder:
        root = Path(folder)
        shutil.copytree(ROOT / "python", root / "python", ignore=shutil.ignore_patterns("__pycache__"))
        yield root


def run_tests(root: Path, tests: tuple[str, ...]) -> Verdict:
    """Run the tests of this checkout against the tree under ``root``."""
    selection = [str(ROOT / "test/srt" / test) for test in tests]
    paths = [str(root / "python"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_DATABASE_FILE": str(root / "hypothesis"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *selection]
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Verdict("killed", TIMEOUT_S, "hung")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    detail = failed[0].partition("::")[2].partition(" - ")[0] if failed else done.stdout[-2000:] + done.stderr[-2000:]
    status = {0: "survived", 1: "killed"}.get(done.returncode, "broken")
    return Verdict(status, time.monotonic() - began, detail)


def run_mutant(mutant: Mutant) -> Verdict:
    with copy_of_tree() as root:
        mutant.apply(root)
        return run_tests(root, mutant.tests)


def run_unchanged(tests: tuple[str, ...]) -> Verdict:
    with copy_of_tree() as root:
        return run_tests(root, tests)


def main(names: list[str]) -> int:
    """Run the mutants whose name contains one of ``names`` (all without any) and print the table."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=180)
    chosen = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    node_ids = sorted({test for mutant in chosen for test in mutant.tests})
    selections = [tuple(group) for _, group in groupby(node_ids, key=lambda node_id: node_id.partition("::")[0])]
    table = Table("mutant", "where", "changed to", "noticed by", "s", title="One line broken at a time")
    counts = {"killed": 0, "survived": 0, "broken": 0}
    with Progress(console=console, transient=True) as progress, ThreadPoolExecutor(WORKERS) as pool:
        bar = progress.add_task("unchanged copy", total=len(selections) + len(chosen))
        for tests, verdict in zip(selections, pool.map(run_unchanged, selections)):
            progress.advance(bar)
            if verdict.status != "survived":
                console.print(f"[red]the unchanged tree fails {' '.join(tests)}[/]\n{verdict.detail}")
                return 2
        progress.update(bar, description="mutants")
        running = {pool.submit(run_mutant, mutant): mutant for mutant in chosen}
        verdicts = {}
        for future in as_completed(running):
            verdicts[running[future]] = future.result()
            progress.advance(bar)
    for mutant in chosen:
        verdict = verdicts[mutant]
        counts[verdict.status] += 1
        noticed = verdict.detail if verdict.status == "killed" else f"[red]{verdict.status}[/]"
        table.add_row(
            mutant.name,
            f"{Path(mutant.file).name}:{mutant.line()}",
            mutant.after.strip(),
            noticed,
            f"{verdict.seconds:.0f}",
        )
    console.print(table)
    console.print(f"{counts['killed']} of {len(chosen)} mutants killed")
    for mutant, verdict in verdicts.items():
        if verdict.status == "broken":
            console.print(f"[red]{mutant.name}: its tests did not run[/]\n{verdict.detail}")
    if counts["broken"]:
        return 2
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
