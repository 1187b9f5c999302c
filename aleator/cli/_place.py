"""Where results go: a directory that one process writes at a time, replaced whole, with what an interrupted run needs beside it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from aleator._errors import StoreError, message

CONFIG = "config.json"
LOCK = "lock"
OURS = re.compile(r"fit\.json|auto\.json|config\.json|compare\.json|held-out\.safetensors|arrays-.*\.safetensors|fit-\d+|\..*\.tmp")


def check_output(out: Path, force: bool, name: str = "fit") -> None:
    """Refuse an output directory before the work, and not after it."""
    from aleator.store import AUTO_NAME, JSON_NAME  # here: the options of every verb are read with this module, and need no JAX

    if not out.resolve().name:
        raise StoreError(message("This directory cannot be replaced.", str(out), "a new directory", "choose another --out"))
    if not out.exists():
        return
    if not out.is_dir():
        raise StoreError(message(f"A {name} is saved to a directory.", f"{out} is a file", "a new directory", "choose another --out"))
    if any((out / file).exists() for file in (JSON_NAME, AUTO_NAME)):
        if not force:
            raise StoreError(
                message(f"There is a {name} already.", str(out), "a new directory", "choose another --out, or add --force to replace it")
            )
    elif any(out.iterdir()):
        raise StoreError(
            message(
                "The directory holds something else.", str(out), f"a new or empty directory, or an earlier {name}", "choose another --out"
            )
        )


def beside(out: Path) -> Path:
    """The directory of an interrupted run."""
    full = out.resolve()
    return full.with_name(full.name + ".checkpoint")


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[Path]:
    """The directory for what an interrupted run needs, held against other processes that write to the same `out`; gone at the end if it is empty."""
    place = beside(out)
    place.mkdir(parents=True, exist_ok=True)
    with open(place / LOCK, "w") as file:
        if not _locked(file):
            got, do = f"a process that is writing to {out}", "wait for it, or choose another --out"
            raise StoreError(message("Two processes cannot write to one directory.", got, "one at a time", do))
        try:
            yield place
        finally:
            (place / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: something to resume from
                place.rmdir()


def _locked(file: object) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: no advisory locks; the replacing below still leaves one whole result
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except OSError:
        return False
    return True


def clear(place: Path) -> None:
    """Remove what a finished run wrote to be resumed: nothing else."""
    from aleator._auto import remove_checkpoint
    from aleator.loop import CHECKPOINT

    (place / CHECKPOINT).unlink(missing_ok=True)
    remove_checkpoint(place)


def replace(out: Path, write: Callable[[Path], None]) -> None:
    """`write` to a new directory and put it in the place of `out`: readers see the old result or the new one. Files of others that are in it stay."""
    full = out.resolve()
    full.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (full.with_name(f".{full.name}.{os.getpid()}.{end}") for end in ("new", "old"))
    try:
        write(fresh)
        if full.is_dir() and any(full.iterdir()):
            os.rename(full, old)
            os.rename(fresh, full)
            for child in old.iterdir():
                if not OURS.fullmatch(child.name) and not (full / child.name).exists():
                    os.rename(child, full / child.name)
            shutil.rmtree(old)
        else:
            os.replace(fresh, full)
    finally:
        if fresh.exists():
            shutil.rmtree(fresh)
