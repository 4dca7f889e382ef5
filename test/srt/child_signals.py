"""Children of a test run in the background inherit that it ignores SIGINT and SIGHUP; ``preexec_fn=heed_signals``."""

import signal


def heed_signals() -> None:
    """Give the signals that end a program their default action."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
