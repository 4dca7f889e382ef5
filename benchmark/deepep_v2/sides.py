"""The two sides of the layer benchmark: worker processes of plain SGLang and of the patch, asked over sockets."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from sglang_deepep_v2.ab.servers import free_port

HERE = Path(__file__).resolve().parent


class WorkerError(RuntimeError):
    """A worker answered with a traceback, died, or did not answer in time."""


class Side:
    """The worker processes, one a rank, of plain SGLang or of the patch."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path):
        self.name, self.processes, self.connections = name, [], []
        address = str(folder / f"{name}.sock")
        listener = Listener(address, family="AF_UNIX")
        listener._listener._socket.settimeout(60)
        environment = dict(os.environ)
        environment.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
        environment.setdefault("EP_DISABLE_GIN", "1")
        environment.setdefault("EP_REUSE_NCCL_COMM", "0")
        environment.setdefault("HF_HUB_OFFLINE", "1")
        environment.setdefault("TRANSFORMERS_OFFLINE", "1")
        if args.device == "cpu":
            environment.setdefault("TRITON_INTERPRET", "1")
        environment["SGLANG_OVERLAY"] = "0" if name == "upstream" else "1"
        try:
            ranks = self._start(args, folder, address, listener, environment)
        except BaseException:
            # Nobody holds a side that was not finished.
            self.stop()
            raise
        self.connections = [ranks[rank] for rank in range(args.ep)]
        listener.close()

    def _start(
        self, args: argparse.Namespace, folder: Path, address: str, listener: Listener, environment: dict[str, str]
    ) -> dict[int, Connection]:
        port = free_port()
        for rank in range(args.ep):
            command = [
                sys.executable,
                str(HERE / "layer_worker.py"),
                address,
                self.name,
                rank,
                args.ep,
                port,
                folder / "model",
                args.device,
            ]
            self.processes.append(subprocess.Popen([str(part) for part in command], env=environment))
        ranks: dict[int, Connection] = {}
        for _ in range(args.ep):
            connection = listener.accept()
            ranks[connection.recv()["rank"]] = connection
        return ranks

    def send(self, op: str, **request) -> None:
        try:
            for connection in self.connections:
                connection.send({"op": op, **request})
        except OSError as error:
            raise WorkerError(f"{self.name} is gone: {error}") from error

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def replies(self, timeout: float) -> list[dict]:
        """One answer a rank. Raises WorkerError with the first traceback; an unanswered request ends the run."""
        deadline = time.monotonic() + timeout
        answers = []
        for rank, connection in enumerate(self.connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    raise WorkerError(f"{self.name} rank {rank} did not answer within {timeout:.0f} s")
                answers.append(connection.recv())
            except (EOFError, OSError) as error:
                # Its peers would wait for it, and their answers would come out of turn.
                self.stop()
                raise WorkerError(f"{self.name} rank {rank} died: exit status {self.processes[rank].poll()}") from error
        for rank, answer in enumerate(answers):
            if "error" in answer and isinstance(answer["error"], str):
                raise WorkerError(f"{self.name} rank {rank}:\n{answer['error']}")
        return answers

    def ask(self, op: str, timeout: float = 240, **request) -> list[dict]:
        self.send(op, **request)
        return self.replies(timeout)

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
