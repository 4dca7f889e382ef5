"""Ranks as processes that may die, each with a pipe of its own and SGLang initialised for expert parallelism.

``run_ranks`` calls one module-level function in every rank, ``RankPool`` one after another in ranks that stay; both
return the results or fail. ``watch_ranks`` reports how each rank ended: by its result, its exception or a signal.
On CPU ranks talk over gloo and are forked from one server that has imported SGLang; on GPUs over NCCL, and are spawned.
"""

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import moe_layer
from sglang_deepep_v2.ab.servers import free_port

# Named in the fork server as well, so that its forks start with SGLang imported.
_PRELOAD = "rank_preload"
_HERE = str(Path(__file__).parent)
_LEAVE_S = 5


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: ``value`` of its function or ``error`` (a traceback), and its exit status (-9 for SIGKILL)."""

    value: Any
    error: str | None
    exit_code: int | None
    seconds: float


def _context():
    if moe_layer.DEVICE == "cuda":
        # A CUDA context does not survive a fork.
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    # The server does not inherit sys.path, only the environment.
    with moe_layer.variables(PYTHONPATH=os.pathsep.join(filter(None, (_HERE, os.environ.get("PYTHONPATH"))))):
        multiprocessing.forkserver.ensure_running()
    return context


def _start(world_size, env, group_timeout_s):
    context, port, ranks = _context(), free_port(), []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(rank, world_size, port, env or {}, group_timeout_s, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    return ranks


def _end(ranks):
    for _, pipe in ranks:
        with contextlib.suppress(OSError):
            pipe.send(None)
    for process, pipe in ranks:
        process.join(_LEAVE_S)
        process.kill()
        process.join()
        pipe.close()


def _main(rank, world_size, port, env, group_timeout_s, pipe):
    """Calls the functions that come through the pipe, up to None or the first exception."""
    try:
        os.environ.update(env)
        torch.set_num_threads(1)
        if group_timeout_s is not None:
            from sglang.srt.distributed import parallel_state

            begin = parallel_state.init_distributed_environment
            parallel_state.init_distributed_environment = partial(begin, timeout=group_timeout_s)
        moe_layer.initialize(rank, world_size, port)
        while (call := pipe.recv()) is not None:
            function, args = call
            pipe.send((function(rank, world_size, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        # An exception leaves a rank as it leaves a scheduler process: at once, with a status of its own.
        sys.stderr.flush()
        os._exit(1)


def watch_ranks(world_size, function, *args, env=None, group_timeout_s=60, deadline_s=60) -> list[Outcome]:
    """``function(rank, world_size, *args)`` in every rank; how each of them ended, by rank.

    Args:
        group_timeout_s: seconds after which a collective of the process groups gives up.
        deadline_s: seconds for all ranks together; whoever runs then is killed and has ``exit_code`` None.
    """
    started = time.monotonic()
    ranks = _start(world_size, env, group_timeout_s)
    outcomes = []
    try:
        for _, pipe in ranks:
            pipe.send((function, args))
            pipe.send(None)
        for process, pipe in ranks:
            value, error = None, None
            with contextlib.suppress(EOFError, ConnectionResetError):
                if pipe.poll(max(0, started + deadline_s - time.monotonic())):
                    value, error = pipe.recv()
            process.join(max(0.1, started + deadline_s - time.monotonic()))
            outcomes.append(Outcome(value, error, process.exitcode, time.monotonic() - started))
            if process.exitcode is None:
                process.kill()
    finally:
        _end(ranks)
    return outcomes


class RankPool:
    """Ranks that stay from one ``run`` to the next; a context manager.

    Args:
        env: variables set in the ranks.
        group_timeout_s: seconds after which a collective of the process groups gives up; None for SGLang's own.
        answer_timeout_s: seconds to wait for a further rank's answer before the others count as hanging.
    """

    def __init__(
        self,
        world_size: int,
        env: dict[str, str] | None = None,
        group_timeout_s: int | None = 60,
        answer_timeout_s: int = 120,
    ):
        self.world_size = world_size
        self._settings = env, group_timeout_s
        self._timeout_s = answer_timeout_s
        self._ranks = []

    def run(self, function, *args) -> list[Any]:
        """``function(rank, world_size, *args)`` in every rank; the results, by rank.

        Raises:
            AssertionError: a rank raised (its traceback is the message), died or did not answer in time. The ranks are
                ended, and the next ``run`` starts new ones.
        """
        self._ranks = self._ranks or _start(self.world_size, *self._settings)
        try:
            for _, pipe in self._ranks:
                pipe.send((function, args))
            return self._answers()
        except BaseException:
            self.close()
            raise

    def _answers(self):
        waiting = {pipe: (rank, process) for rank, (process, pipe) in enumerate(self._ranks)}
        values = {}
        while waiting:
            ready = wait(waiting, self._timeout_s)
            assert ready, f"ranks {[rank for rank, _ in waiting.values()]} of {self.world_size} do not answer"
            for pipe in ready:
                rank, process = waiting.pop(pipe)
                try:
                    values[rank], error = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process.join(_LEAVE_S)
                    raise AssertionError(f"rank {rank} of {self.world_size} died: {process.exitcode}") from None
                # The first to fail says why; those that wait for it fail later.
                assert error is None, f"rank {rank}:\n{error}"
        return [values[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        _end(self._ranks)
        self._ranks = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def run_ranks(world_size, function, *args, env=None, timeout_s=240) -> list[Any]:
    """``function(rank, world_size, *args)`` in ranks of their own; the results, by rank.

    Raises:
        AssertionError: as ``RankPool.run``.
    """
    with RankPool(world_size, env, group_timeout_s=None, answer_timeout_s=timeout_s) as pool:
        return pool.run(function, *args)
