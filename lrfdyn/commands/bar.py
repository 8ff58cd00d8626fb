"""A progress bar for commands whose output may go to a file or another program."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress


def bar(visible: bool = True) -> Progress:
    """On the error stream, and only where a person sees it."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not visible or not console.is_terminal)
