"""Progress bars for commands whose output may go to a file or another program."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def bar(visible: bool = True) -> Progress:
    """On the error stream, and only where a person sees it."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not visible or not console.is_terminal)


def bars(console: Console) -> Progress:
    """Bars whose tasks have a description and a field `news` for what was last heard of them."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
