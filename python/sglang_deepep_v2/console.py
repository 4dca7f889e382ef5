"""The console of `status` and `upstream`, and what becomes of output that nobody can take."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console

_UNCUT = 10_000
# What a shell says of a program that SIGPIPE ended.
_READER_GONE = 128 + 13


def make_console(stderr: bool = False) -> Console:
    """A console whose lines stay whole, at any COLUMNS, where its stream is no terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_UNCUT)


class _Watched:
    """A stream that remembers, and raises, the first error of a write: rich and click make exit code 1 of some."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._noting(self._stream.write, text)

    def flush(self) -> None:
        self._noting(self._stream.flush)

    def _noting(self, action, *arguments):
        try:
            return action(*arguments)
        except OSError as error:
            self.lost = self.lost or error
            raise


@contextlib.contextmanager
def watched_output() -> Iterator[None]:
    """Whatever the block ends with, output that was lost ends the program by an exit code of its own.

    Raises:
        SystemExit: 141, quietly, where the reader is gone; os.EX_IOERR, after one line on stderr, for another reason.
    """
    # A stream that was closed before the program started is None.
    before = {name: stream for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None}
    watched = {name: _Watched(stream) for name, stream in before.items()}
    for name, stream in watched.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in watched.items():
            setattr(sys, name, before[name])
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        lost = {name: stream.lost for name, stream in watched.items() if stream.lost}
        for name in lost:
            # What is still buffered would fail once more at the interpreter's end.
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), before[name].fileno())
        if lost:
            raise SystemExit(_code_of(*lost.values())) from None


def _code_of(*errors: OSError) -> int:
    others = [error for error in errors if error.errno != errno.EPIPE]
    if not others:
        return _READER_GONE
    with contextlib.suppress(OSError, AttributeError):
        print(f"cannot write the output: {others[0].strerror}", file=sys.stderr, flush=True)
    return os.EX_IOERR
