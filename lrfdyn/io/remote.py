"""The Hugging Face hub, as the package calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from lrfdyn.errors import LrfdynError, first_line
from lrfdyn.version import __version__

OURS = {"library_name": "lrfdyn", "library_version": __version__}  # what the hub is told of its caller


@contextmanager
def huggingface_hub(problem: str) -> Iterator[ModuleType]:
    """The library, whose errors become `problem` and the first line of what it says."""
    try:
        import huggingface_hub

        yield huggingface_hub
    except ImportError:
        raise LrfdynError(f"{problem}; it needs huggingface_hub: pip install 'lrfdyn[hub]'") from None
    except Exception as error:  # connection, rights, names: the library has many kinds
        raise LrfdynError(f"{problem} ({first_line(error)})") from error
