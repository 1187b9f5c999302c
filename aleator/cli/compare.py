"""`aleator compare`: every method on the same held-out rows, told apart by paired differences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli import _config
from aleator.cli._common import EXIT_CODES, console, guarded, print_json
from aleator.cli.fit import Task, hidden_sizes, how_to_continue, inferred, prepare, print_inferred, widths

FILE = "compare.json"
SAVED = ("table", "target", "methods", "budget", "out", "task", "hidden", "prior_scale", "seed")
HELP = f"""Compare methods on a table by cross-validation: scores with error bars, evidence, calibration, time, stacking weights, a verdict.

Nothing is fitted for keeps; take what the verdict names to `aleator fit --method`. With --out the comparison is saved there, and Ctrl-C leaves
what `--resume` needs in OUT.checkpoint.

{EXIT_CODES}
"""


@guarded
def command(
    table: Annotated[Path, typer.Argument(help="CSV, TSV or Parquet file.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Names with commas: those of `aleator methods`, and linear, ridge, logistic, gp, gp_rough, wide. By default, what suits."
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for everything, such as 90s or 10m; what does not fit is left out.")] = "10m",
    out: Annotated[Path | None, typer.Option(help="Directory to save the comparison in.")] = None,
    task: Annotated[Task | None, typer.Option(help="Overrules what the target column looks like.")] = None,
    hidden: Annotated[str, typer.Option(callback=widths, help="Widths of the hidden layers of networks, e.g. 50,50.")] = "50",
    prior_scale: Annotated[float | None, typer.Option(help="Prior scale of the weights (of columns as standardised).")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted comparison with the same options (needs --out).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier comparison in the output directory.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(callback=_config.load, is_eager=True, help="Options from a config.json, or a directory that has one."),
    ] = None,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    import contextlib

    options = {name: value for name, value in locals().items() if name in SAVED}
    from aleator import defaults
    from aleator._auto import auto, seconds_of
    from aleator.cli import _place, _road
    from aleator.cli._watch import print_found, watching

    if resume and out is None:
        raise typer.BadParameter("needs --out, where the interrupted comparison is.", param_hint="--resume")
    limit = seconds_of(budget)
    screen = console(to_json)
    if out is not None:
        check_output(out, force)
    names = None if methods is None else defaults.check_names([name.strip() for name in methods.split(",") if name.strip()])
    key_fit, _, split_seed = _road.keys(seed)
    (preprocessor, x, y), _, notes = prepare(table, target, None if task is None else str(task), split_seed, False)
    notes += list(preprocessor.notes)
    facts = inferred(preprocessor, table, len(x), 0, x.shape[1])
    print_inferred(screen, facts, notes)
    candidates = defaults.compared(preprocessor.task, x, len(preprocessor.labels), hidden_sizes(hidden), prior_scale, names)
    unit = preprocessor.y_scale if preprocessor.task == "regression" else 1.0
    with contextlib.ExitStack() as stack:
        place = None if out is None else stack.enter_context(_place.claimed(out))
        run: dict[str, Any] = {} if place is None else {"checkpoint": place, "resume": resume}
        try:
            with watching(screen, limit) as (report, watch):
                found = auto(
                    key_fit, None, (x, y), budget, candidates, report, unit=unit, compare_only=True, watch=watch, progress=False, **run
                )
        except KeyboardInterrupt:
            words = "Nothing was saved. With --out an interrupted comparison can be continued." if place is None else how_to_continue(place)
            raise KeyboardInterrupt(words) from None
        document = {**facts, "notes": notes, **found.to_json(), "verdict": found.verdict, "best": found.best}
        if out is not None and place is not None:
            _place.replace(out, lambda directory: save(directory, document, options))
            _place.clear(place)
    if to_json:
        print_json(document | {"out": out})
        return
    print_found(screen, found)
    screen.print(found.status, markup=False, soft_wrap=True)
    saved = f"Saved in {out}. " if out is not None else ""
    screen.print(f"{saved}Next: {fit_command(table, target, found.best)}", markup=False, soft_wrap=True)


def fit_command(table: Path, target: str, best: str) -> str:
    """What to type next: the stack, or the best method by itself where the command line has it by that name."""
    import shlex

    from aleator.methods import METHODS

    alone = f" --method {best}" if best in METHODS else ""
    return shlex.join(["aleator", "fit", str(table), "--target", target]) + f"{alone} --out DIRECTORY"


def save(directory: Path, document: dict[str, Any], options: dict[str, Any]) -> None:
    import json

    from aleator._files import write_atomic
    from aleator.cli._common import plain

    write_atomic(directory / FILE, (json.dumps(plain(document), indent=1, ensure_ascii=False) + "\n").encode())
    _config.write(directory, "compare", options)


def check_output(out: Path, force: bool) -> None:
    """As for fits: a new or empty directory, or an earlier comparison with --force."""
    from aleator._errors import StoreError, message
    from aleator.cli import _place

    if (out / FILE).is_file():
        if force:
            return
        do = "choose another --out, or add --force to replace it"
        raise StoreError(message("There is a comparison already.", str(out), "a new directory", do))
    _place.check_output(out, False, "comparison")
