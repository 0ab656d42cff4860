"""Have signals that end a process do what Ctrl-C does, so that it ends what it has started."""

from __future__ import annotations

import signal


def interrupt_at_signals() -> None:
    """SIGTERM and a closed terminal's SIGHUP raise KeyboardInterrupt; nohup's SIGHUP does not."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
