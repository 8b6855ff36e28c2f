"""Signals for tests and what they start, whatever the shell that started the suite had decided.

A shell has its background jobs ignore SIGINT, nohup has them ignore SIGHUP, and every process that they start inherits
that. So tests that send these signals would wait in vain. Of a signal that has a handler, a new process gets the
default.
"""

import signal


def take_back_signals() -> None:
    """Let SIGINT interrupt this process again. SIGHUP still does nothing to it, as nohup promises."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
