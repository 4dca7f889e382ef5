"""The launcher of ranks: results by rank, and a failing rank's own words, forked or spawned."""

import multiprocessing
import os
import signal
import time

import pytest
import torch.distributed as dist

import rank_processes
from rank_processes import RankPool

ENV = {"WORD": "set"}


def fail_on(rank, world_size, victim, how):
    if rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("no room")
    # The others wait for the victim.
    dist.barrier()
    return rank, os.environ["WORD"]


def hang(rank, world_size):
    time.sleep(600)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_results_come_by_rank_and_the_first_failure_is_the_message(method, monkeypatch):
    if method == "spawn":
        monkeypatch.setattr(rank_processes, "_context", lambda: multiprocessing.get_context("spawn"))
    with RankPool(2, ENV) as pool:
        assert pool.run(fail_on, None, "") == [(0, "set"), (1, "set")]
        with pytest.raises(AssertionError, match=r"(?s)^rank 1:.*MemoryError: no room"):
            pool.run(fail_on, 1, "raises")


def test_a_pool_works_again_after_a_rank_died():
    with RankPool(2, ENV) as pool:
        with pytest.raises(AssertionError, match="rank 0 of 2 died: -9|rank 1:\\n"):
            pool.run(fail_on, 0, "killed")
        assert pool.run(fail_on, None, "") == [(0, "set"), (1, "set")]


def test_ranks_that_do_not_answer_are_named_and_ended(monkeypatch):
    monkeypatch.setattr(rank_processes, "_LEAVE_S", 0.1)
    with RankPool(2, ENV) as pool:
        pool.run(fail_on, None, "")
        processes = [process for process, _ in pool._ranks]
        pool._timeout_s = 0.5
        with pytest.raises(AssertionError, match=r"ranks \[0, 1\] of 2 do not answer"):
            pool.run(hang)
        assert not any(process.is_alive() for process in processes)
