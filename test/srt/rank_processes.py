"""Gloo ranks as processes that may die: forked from one server that has imported SGLang, each with a pipe of its own.

``start_ranks`` runs one function per rank and reports how each ended, whether by its result, its exception or a signal.
``RankPool`` keeps its ranks and runs one function after another in them.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Named in the fork server as well, so that its forks start with SGLang imported.
_PRELOAD = "rank_preload"
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: ``value`` of its function or ``error`` (a traceback), and its exit status (-9 for SIGKILL)."""

    value: Any
    error: str | None
    exit_code: int | None
    seconds: float


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    # The server does not inherit sys.path, only the environment.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_HERE, before)))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _start(world_size, main, *args, env=None, group_timeout_s):
    context, port, ranks = _context(), free_port(), []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        values = (rank, world_size, port, env or {}, group_timeout_s, theirs, *args)
        process = context.Process(target=main, args=values, daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    return ranks


def _initialize(rank, world_size, port, env, group_timeout_s):
    os.environ.update(env)
    import torch
    from sglang.srt.distributed import parallel_state

    import moe_layer

    torch.set_num_threads(1)
    begin = parallel_state.init_distributed_environment
    parallel_state.init_distributed_environment = partial(begin, timeout=group_timeout_s)
    moe_layer.initialize(rank, world_size, port)


def _main_once(rank, world_size, port, env, group_timeout_s, pipe, function, args):
    try:
        _initialize(rank, world_size, port, env, group_timeout_s)
        pipe.send((function(rank, world_size, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        # An exception leaves a rank as it leaves a scheduler process: at once, with a status of its own.
        sys.stderr.flush()
        os._exit(1)


def run_ranks(world_size, function, *args, env=None, group_timeout_s=60, deadline_s=60) -> list[Outcome]:
    """``function(rank, world_size, *args)`` in every rank; how each of them ended, by rank.

    Args:
        group_timeout_s: seconds after which a collective of the process groups gives up.
        deadline_s: seconds for all ranks together; whoever runs then is killed and has ``exit_code`` None.
    """
    started = time.monotonic()
    ranks = _start(world_size, _main_once, function, args, env=env, group_timeout_s=group_timeout_s)
    outcomes = []
    for process, pipe in ranks:
        value, error = None, None
        with contextlib.suppress(EOFError, ConnectionResetError):
            if pipe.poll(max(0, started + deadline_s - time.monotonic())):
                value, error = pipe.recv()
        process.join(max(0.1, started + deadline_s - time.monotonic()))
        outcomes.append(Outcome(value, error, process.exitcode, time.monotonic() - started))
        if process.exitcode is None:
            process.kill()
            process.join()
    return outcomes


def _main_loop(rank, world_size, port, env, group_timeout_s, pipe):
    _initialize(rank, world_size, port, env, group_timeout_s)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((function(rank, world_size, *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


class RankPool:
    """Ranks that stay; a context manager.

    Args:
        group_timeout_s: seconds after which a collective of the process groups gives up.
        answer_timeout_s: seconds one ``run`` may take before its ranks count as hanging.
    """

    def __init__(
        self,
        world_size: int,
        env: dict[str, str] | None = None,
        group_timeout_s: int = 60,
        answer_timeout_s: int = 120,
    ):
        self.world_size = world_size
        self._timeout_s = answer_timeout_s
        self._ranks = _start(world_size, _main_loop, env=env, group_timeout_s=group_timeout_s)

    def run(self, function, *args) -> list[Any]:
        """``function(rank, world_size, *args)`` in every rank; the results, by rank.

        Raises:
            AssertionError: a rank raised (its traceback is the message), died or did not answer in time.
        """
        for _, pipe in self._ranks:
            pipe.send((function, args))
        answers = []
        for rank, (process, pipe) in enumerate(self._ranks):
            assert pipe.poll(self._timeout_s), f"rank {rank} of {self.world_size} does not answer"
            try:
                answers.append(pipe.recv())
            except EOFError:
                process.join(5)
                raise AssertionError(f"rank {rank} of {self.world_size} died: {process.exitcode}") from None
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(answers) if error]
        assert not errors, "\n".join(errors)
        return [value for value, _ in answers]

    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._ranks]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process, pipe in self._ranks:
            pipe.close()
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
