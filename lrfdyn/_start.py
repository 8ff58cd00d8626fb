"""Ctrl-C while the program is still importing ends it at once and without a word, as it ends most programs; in the
midst of an import Python would print where it was. A library that is imported leaves signals alone."""

import os
import signal
import sys

COMMAND = sys.argv[:1] == ["-m"] and sys.orig_argv[1:3] == ["-m", "lrfdyn"]  # or the script of that name:
COMMAND = COMMAND or os.path.basename((sys.argv or [""])[0]) in ("lrfdyn", "lrfdyn.exe")
if COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def listen() -> None:
    """From here on Ctrl-C is an exception again."""
    if COMMAND and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
