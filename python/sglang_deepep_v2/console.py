"""The console of `status` and `upstream`."""

from rich.console import Console

_UNCUT = 10_000


def make_console(stderr: bool = False) -> Console:
    """A console whose lines stay whole, at any COLUMNS, where its stream is no terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_UNCUT)
