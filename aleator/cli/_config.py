"""The options of a run as a file: written next to the results, accepted back by --config. What is typed overrules what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from aleator.cli._common import plain
from aleator.cli._place import CONFIG

VERB = "verb"
ABOUT = ("aleator", VERB)


def load(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of --config, before all other options: its values become the defaults of this run."""
    if path is None or context.resilient_parsing:
        return path
    wrong = lambda text: typer.BadParameter(f"{path}: {text}", ctx=context, param_hint="--config")
    try:
        found = json.loads((path / CONFIG if path.is_dir() else path).read_text())
    except OSError as error:
        raise wrong(f"cannot be read ({error.strerror}); pass a config.json or a directory that has one.") from None
    except (ValueError, RecursionError) as error:
        raise wrong(f"is no JSON ({error}).") from None
    if not isinstance(found, dict):
        raise wrong("is no JSON object of options.")
    known = {parameter.name for parameter in context.command.params} - {"config"}
    verb = context.command.name
    if found.get(VERB, verb) != verb:
        raise wrong(f"was written by `aleator {found[VERB]}`, and this is `aleator {verb}`.")
    unknown = sorted(set(found) - known - set(ABOUT))
    if unknown:
        raise wrong(f"has options that do not exist: {', '.join(unknown)}; known: {', '.join(sorted(map(str, known)))}.")
    context.default_map = {**(context.default_map or {}), **{k: v for k, v in found.items() if k not in ABOUT and v is not None}}
    return path


def write(directory: Path, verb: str, options: dict[str, Any]) -> None:
    """All options of a run, those left at their defaults too: a later version with other defaults runs the same."""
    from aleator._files import write_atomic
    from aleator._version import __version__

    document = {"aleator": __version__, VERB: verb, **options}
    write_atomic(directory / CONFIG, (json.dumps(plain(document), indent=1, ensure_ascii=False) + "\n").encode())
