"""What all verbs share: errors as one clean paragraph, notes on stderr, JSON, the compilation cache."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer

REFUSED, USAGE, RED, DEFECT, INTERRUPTED = 1, 2, 3, 70, 130
EXIT_CODES = (
    "Exit codes: 0 done; 1 the data, model, method or a file was refused; 2 wrong usage; 3 `audit` found something red; "
    "70 a defect of aleator (ALEATOR_TRACEBACK=1 shows where); 130 interrupted."
)
Command = TypeVar("Command", bound=Callable[..., None])


def guarded(command: Command) -> Command:
    """Turn errors made on purpose into a paragraph on stderr and exit code 1, Ctrl-C into 130, health warnings into notes; what nobody foresaw has
    code 70 and names itself a defect. Nothing ends in a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        from aleator._errors import AleatorError, HealthWarning

        with warnings.catch_warnings():
            warnings.simplefilter("always", HealthWarning)
            shown = warnings.showwarning

            def show(text: Any, category: type[Warning], *where: Any, **more: Any) -> None:
                if issubclass(category, HealthWarning):
                    note(str(text))
                else:
                    shown(text, category, *where, **more)

            warnings.showwarning = show  # type: ignore[assignment]
            try:
                command(*args, **kwargs)
            except AleatorError as error:
                paragraph(f"Error: {error}")
                raise typer.Exit(REFUSED) from None
            except KeyboardInterrupt as stop:
                paragraph(f"Stopped. {stop}".strip())
                raise typer.Exit(INTERRUPTED) from None
            except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
                raise
            except (OSError, MemoryError) as error:
                paragraph(f"Error: {_system(error)}")
                raise typer.Exit(REFUSED) from None
            except Exception as error:
                if os.environ.get("ALEATOR_TRACEBACK"):
                    raise
                got = f"{type(error).__name__}: {error}"
                do = "set ALEATOR_TRACEBACK=1, run it again and report what it prints"
                paragraph(f"Error: This is a defect of aleator. Got: {got}. Expected: a result or a refusal. Do this: {do}.")
                raise typer.Exit(DEFECT) from None

    return run  # type: ignore[return-value]


def _system(error: OSError | MemoryError) -> str:
    """What the machine could not do, as any other refusal."""
    from aleator._errors import message

    if isinstance(error, MemoryError):
        return message(
            "There is not enough memory.", str(error) or "an allocation failed", "a smaller problem", "use fewer rows or columns"
        )
    got = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return message("A file cannot be read or written.", got, "a place that can be used", "check permissions, names and free space")


def paragraph(text: str) -> None:
    """One paragraph on stderr, as a single line: terminals wrap it, logs and pipes keep it whole."""
    typer.echo(" ".join(text.split()), err=True)


def note(text: str) -> None:
    paragraph(f"Note: {text}")


def console(to_json: bool) -> Any:
    """Where people read: stdout, or stderr when stdout carries JSON."""
    from rich.console import Console

    # Piped output has no width of its own: wide enough for the tables, so that nothing is cut in a log.
    width = None if (sys.stderr if to_json else sys.stdout).isatty() else 120
    return Console(stderr=to_json, highlight=False, soft_wrap=False, width=width)


def print_json(document: Any) -> None:
    """Strict JSON on stdout: numbers that are not finite are null."""
    typer.echo(json.dumps(plain(document), indent=1, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """NumPy numbers and arrays, tuples, paths and anything else, as JSON can say it."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def command_again(*extra: str) -> str:
    """The command as it was typed, with more options."""
    import shlex

    given = [word for word in sys.argv[1:] if word not in extra]
    return shlex.join(["aleator", *given, *extra])


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache directory: a second run of the same shapes starts at once.

    JAX_COMPILATION_CACHE_DIR chooses another place; empty switches it off. The library never does this by itself.
    """
    directory = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache_home() / "aleator" / "jax"))
    seconds = os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    if "jax" in sys.modules:  # it has read its environment already
        import jax

        jax.config.update("jax_compilation_cache_dir", directory or None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))


def _cache_home() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
