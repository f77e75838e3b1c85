"""What all commands share: an error is one line, a bug leaves a log file, and what a command chooses from is lazy."""

import argparse
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress

from .extras import install_command
from .text import first_line, printable

__all__ = ["INTERRUPTED", "add_kinds", "is_out_of_memory", "run_command", "run_kind"]

FAILED, INTERRUPTED = 1, 130  # argparse's 2 is for wrong usage
_MEMORY = ("can't allocate memory", "out of memory")


def run_command(name: str, work: Callable[[], int | None]) -> int:
    """The exit code of `work()`: what it returns, 1 after an error, 130 after Ctrl-C.

    An error that the user can mend (`ValueError`, files, missing packages, memory) is printed as one line. Any other
    one is a bug: one line says so and names the file with its traceback. `WBMM_DEBUG=1` lets all of them through.

    Args:
        name: as the user typed it, e.g. `wbmm train`.
        work: the command.
    """
    try:
        return work() or 0
    except KeyboardInterrupt as error:
        if _debug():
            raise
        if os.environ.get("RANK", "0") == "0":
            _say(name, str(error) or "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # `wbmm list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if _debug():
            raise
        _say(name, _explain(error) or _report(name, error))
        return FAILED


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of Python, PyTorch or CUDA says that memory ran out."""
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _MEMORY)


def _debug() -> bool:
    return os.environ.get("WBMM_DEBUG", "") not in ("", "0")


def _say(name: str, text: str) -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        name = f"[rank {os.environ.get('RANK', '?')}] {name}"
    text = "\n".join(printable(line.expandtabs(4), limit=2000) for line in text.splitlines())  # it may quote a file
    with suppress(OSError):  # whoever read it is gone, e.g. `| tee` by the same Ctrl-C
        print(f"{name}: {text}", file=sys.stderr, flush=True)


def _explain(error: Exception) -> str | None:
    """What to tell the user of an expected error; None for a bug."""
    text = str(error).strip()
    if isinstance(error, OSError) and not isinstance(error, FileExistsError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}"
    if isinstance(error, ImportError):  # a package of an extra is missing; a module of our own would be a bug
        command = install_command(error.name)
        advice = f": {command}" if command and "pip install" not in text else ""
        text = text or f"the package {error.name} is missing"
        return None if (error.name or "").startswith("wbmm") else f"{text}{advice}"
    if is_out_of_memory(error):
        return f"out of memory ({first_line(error)}); use a smaller batch, image size or model"
    expected = isinstance(error, (ValueError, OSError, FloatingPointError))
    return text if expected and text else None


def _report(name: str, error: Exception) -> str:
    """Writes the traceback to a file and says where it is."""
    what = f"{type(error).__name__}: {first_line(error)}"
    try:
        handle, path = tempfile.mkstemp(prefix="wbmm-error-", suffix=".log")  # a new file, nobody else's
        with open(handle, "w", encoding="utf-8") as file:
            file.write(f"{name}\n{' '.join(sys.argv)}\nPython {sys.version}\n\n{traceback.format_exc()}")
        where = f"the traceback is in {path}"
    except OSError:
        where = "WBMM_DEBUG=1 shows the traceback"
    return f"unexpected error, {what}. This is a bug; please report it: {where}"


def add_kinds(parser: argparse.ArgumentParser, kinds: Mapping[str, tuple[str, str]]) -> None:
    """A first argument that says which module does the work, e.g. `wbmm bench model`.

    Args:
        parser: of the command.
        kinds: name to (module, summary). A module is imported, with torch, only when it is asked for.
    """

    class KindParser(argparse.ArgumentParser):
        def parse_known_args(self, args=None, namespace=None):
            module = importlib.import_module(kinds[self.prog.split()[-1]][0])
            self.description, self.epilog = module.__doc__, f"example:\n  {module.EXAMPLE}"
            module.add_arguments(self)
            return super().parse_known_args(args, namespace)

    choice = parser.add_subparsers(
        dest="kind", required=True, metavar="{" + ",".join(kinds) + "}", parser_class=KindParser
    )
    for name, (_, summary) in kinds.items():
        choice.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_kind(args: argparse.Namespace, kinds: Mapping[str, tuple[str, str]]) -> int:
    """Runs the module that was asked for."""
    return importlib.import_module(kinds[args.kind][0]).run(args)
