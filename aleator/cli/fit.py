"""`aleator fit`: from a table to a saved fit, with an honest score on rows it has not seen."""

from __future__ import annotations

import contextlib
import enum
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli import _config
from aleator.cli._common import EXIT_CODES, command_again, console, guarded, note, print_json

CHECKPOINT_SECONDS = 5.0
COMPARABLE = 10  # rows from which on several methods are compared
BUDGET = "50s"  # leaves room for imports, reading and saving within a minute
SAVED = ("table", "target", "out", "method", "budget", "settings", "task", "hidden", "prior_scale", "seed", "holdout", "checkpoint")


class Task(enum.StrEnum):
    regression = "regression"
    classification = "classification"


def widths(text: str) -> str:
    """Check `--hidden` while the command line is read, so that a slip is a usage error."""
    try:
        sizes = hidden_sizes(text)
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise typer.BadParameter(f"{text!r}: give the widths of the hidden layers as whole numbers ≥ 1 with commas, such as 50 or 50,50.")
    return text


def hidden_sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def keys_and_values(settings: list[str] | None) -> list[str]:
    """The `--set` options, each of the form key=value: anything else is a usage error."""
    for setting in settings or []:
        if "=" not in setting or setting.startswith("="):
            raise typer.BadParameter(f"{setting!r}: write key=value, such as num_steps=500.", param_hint="--set")
    return settings or []


HELP = f"""Fit a table and save the result.

By default several methods (linear, Gaussian processes, networks) are compared by cross-validation within --budget and stacked: `--method auto`.
Ctrl-C leaves what `--resume` needs in OUT.checkpoint. OUT/config.json holds all options, for `--config`.

{EXIT_CODES}
"""


@guarded
def command(
    table: Annotated[Path, typer.Argument(help="CSV, TSV or Parquet file.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    out: Annotated[Path, typer.Option(help="Directory to save the fit in.")],
    method: Annotated[
        str, typer.Option(help="How to infer: see `aleator methods`; `auto` tries several within --budget and stacks them.")
    ] = "auto",
    budget: Annotated[str, typer.Option(help="Time for `--method auto`, such as 90s or 10m.")] = BUDGET,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A hyper-parameter as key=value; may be repeated.")] = None,
    task: Annotated[Task | None, typer.Option(help="Overrules what the target column looks like.")] = None,
    hidden: Annotated[str, typer.Option(callback=widths, help="Widths of the hidden layers of networks, e.g. 50,50.")] = "50",
    prior_scale: Annotated[float | None, typer.Option(help="Prior scale of the weights (of columns as standardised).")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")] = 0,
    holdout: Annotated[
        bool | None,
        typer.Option(
            "--holdout/--no-holdout",
            help="Keep 20 % of the rows for a score, or fit all rows. Left out, `auto` fits all (it cross-validates), one method keeps 20 %.",
        ),
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint/--no-checkpoint", help="Write what an interrupted run needs to continue, to OUT.checkpoint.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run with the same options.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier fit in the output directory.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(callback=_config.load, is_eager=True, help="Options from a config.json, or a directory that has one."),
    ] = None,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    options = {name: value for name, value in locals().items() if name in SAVED}
    from aleator import defaults
    from aleator._auto import seconds_of
    from aleator.cli import _place, _road, _scores

    chosen_settings = keys_and_values(settings)
    began = time.perf_counter()
    screen = console(to_json)
    _place.check_output(out, force)
    several = method.lower() == "auto"
    if several:
        check_auto(chosen_settings)
        seconds_of(budget)
    else:
        defaults.method(method, chosen_settings, 1)  # a slip in the settings is reported before the table is read
    key_fit, key_predict, split_seed = _road.keys(seed)
    train, held, notes = prepare(
        table, target, None if task is None else str(task), split_seed, not several if holdout is None else holdout
    )
    preprocessor, x, y = train
    num_classes, sizes = len(preprocessor.labels), hidden_sizes(hidden)
    notes += list(preprocessor.notes)
    if several and len(x) < COMPARABLE:
        several, method = False, "exact" if preprocessor.task == "regression" else "ensemble"
        notes.append(f"{len(x)} rows are too few to compare methods by (from {COMPARABLE} on): fitted by {method}")
    facts = inferred(preprocessor, table, len(x), 0 if held is None else len(held), x.shape[1])
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(_place.claimed(out))
        resumable = {"checkpoint": place, "resume": resume} if checkpoint or resume else {}
        try:
            print_inferred(screen, facts, notes)
            if several:
                methods = defaults.auto_methods(preprocessor.task, x, num_classes, sizes, prior_scale)
                fit: Any = fit_several(screen, key_fit, preprocessor, x, y, methods, budget, **resumable)
            else:
                chosen = defaults.method(method, chosen_settings, len(x))
                candidates = defaults.models(chosen, preprocessor.task, x.shape[1], num_classes, sizes, prior_scale)
                run = resumable | ({"checkpoint_every": CHECKPOINT_SECONDS} if resumable else {})
                fit = _road.fit(key_fit, candidates, x, y, chosen, preprocessor, **run)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(how_to_continue(place if resumable else None)) from None
        if held is not None:
            predicted = fit.predict(key_predict, held.drop(columns=target))
            lines = _scores.scores(predicted, preprocessor.invert_target(preprocessor.encode_target(held)), preprocessor.task, target)
            title = f"On {facts['rows_held_out']} rows held out (fitted to the other {facts['rows']})"
        else:
            lines = _scores.stacked(fit.whole, target) if several else []
            title = f"Cross-validated over {len(next(iter(fit.held_out.values())))} rows, each predicted unseen" if several else ""
        fit = _road.with_record(fit, {"table": facts, "held_out_scores": _scores.as_json(lines)})

        def write(directory: Path) -> None:
            fit.save(directory)
            _config.write(directory, "fit", options)

        _place.replace(out, write)
        _place.clear(place)
    seconds = time.perf_counter() - began
    if to_json:
        print_json(
            {
                **facts,
                "notes": notes,
                "method": repr(fit.method),
                "model": repr(fit.model),
                "scores": _scores.as_json(lines),
                "compared": fit.to_json() if several else None,
                "status": fit.status,
                "seconds": seconds,
                "out": out,
            }
        )
        return
    report(screen, fit, lines, title, out, seconds)


def check_auto(settings: list[str]) -> None:
    """Refuse what `--method auto` cannot do before the table is read."""
    from aleator._errors import MethodError, message

    if settings:
        raise MethodError(message("auto chooses its own settings.", "--set", "--budget only", "name one method with --method to set it up"))


def fit_several(screen: Any, key: Any, preprocessor: Any, x: Any, y: Any, methods: dict[str, Any], budget: str, **run: Any) -> Any:
    """Several methods within the budget, stacked; each is told of as it ends."""
    from aleator._auto import auto, seconds_of
    from aleator.cli._watch import watching

    with watching(screen, seconds_of(budget)) as (report, watch):
        unit = preprocessor.y_scale if preprocessor.task == "regression" else 1.0
        found = auto(key, None, (x, y), budget, methods, report, unit=unit, watch=watch, progress=False, **run)
    return found.with_preprocessor(preprocessor)


def prepare(path: Path, target: str, task: str | None, seed: int, holdout: bool) -> tuple[Any, Any, list[str]]:
    """((preprocessor, x, y) of the training rows, held-out rows or None, notes). The task is inferred from all rows, the rest is not."""
    from aleator._columns import missing_in
    from aleator.cli import _road
    from aleator.tables import Preprocessor, read_table

    frame = read_table(path)
    if target not in frame.columns and target in map(str, frame.columns):
        frame = frame.set_axis([str(name) for name in frame.columns], axis=1)  # Parquet may name columns by numbers
    whole, _, y = Preprocessor.fit(frame, target, task)
    notes = [text.replace("task='regression'", "--task regression") for text in whole.notes if text.startswith("the target")]
    gone = missing_in(frame[target])
    if gone.any():
        notes.append(f"{gone.sum()} of {len(frame)} rows have no value of {target!r}: dropped")
        frame = frame[~gone]
    if not holdout or len(frame) < _road.FEW_ROWS:
        if holdout:
            notes.append(f"{len(frame)} rows are too few to hold any out (from {_road.FEW_ROWS} on): no score")
        return Preprocessor.fit(frame, target, whole.task), None, notes
    rows, held = _road.split(seed, len(frame), y if whole.task == "classification" else None)
    return Preprocessor.fit(frame.iloc[rows], target, whole.task), frame.iloc[held], notes


def inferred(preprocessor: Any, path: Path, num_train: int, num_held: int, num_features: int) -> dict[str, Any]:
    """What was found out about the table."""
    kinds: dict[str, list[str]] = {}
    for column in preprocessor.columns:
        kinds.setdefault(column.kind, []).append(column.name)
    facts = {
        "file": path.name,
        "target": preprocessor.target,
        "task": preprocessor.task,
        "columns": kinds,
        "dropped": list(preprocessor.dropped),
    }
    if preprocessor.task == "classification":
        facts["classes"] = list(preprocessor.labels)
    return facts | {"rows": num_train, "rows_held_out": num_held, "features": num_features}


def print_inferred(screen: Any, facts: dict[str, Any], notes: list[str]) -> None:
    from rich.markup import escape

    classes = f", {len(facts['classes'])} classes: {_some(facts['classes'])}" if "classes" in facts else ""
    screen.print(escape(f"{facts['file']}: {facts['task']} of {facts['target']!r}{classes}"), soft_wrap=True)
    for kind, names in facts["columns"].items():
        screen.print(escape(f"  {kind}: {len(names)} column{'s' * (len(names) > 1)}: {_some(names)}"), soft_wrap=True)
    held = f"{facts['rows_held_out']} held out for the score" if facts["rows_held_out"] else "none held out"
    screen.print(f"  {facts['features']} features; {facts['rows']} rows to fit, {held}", soft_wrap=True)
    for text in notes:
        note(text)


def _some(names: list[Any], most: int = 10) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def how_to_continue(place: Path | None) -> str:
    if place is None:
        return "Nothing was saved. Without --no-checkpoint an interrupted run can be continued."
    return f"The run so far is in {place}. Continue with: {command_again('--resume')}"


def report(screen: Any, fit: Any, lines: list[Any], title: str, out: Path, seconds: float) -> None:
    from rich.markup import escape

    from aleator.cli import _scores, _watch

    if hasattr(fit, "fits"):
        _watch.print_found(screen, fit)
    else:
        screen.print(escape(f"Fitted by {fit.method!r}"), soft_wrap=True)
    screen.print(escape(fit.status), soft_wrap=True)
    if fit.log_evidence is not None:
        screen.print(
            escape(f"Prior {fit.model.prior!r}; log evidence {fit.log_evidence.value:.3f} nats ({fit.log_evidence.kind})"), soft_wrap=True
        )
    if lines:
        screen.print(_scores.table(lines, title))
    screen.print(
        escape(f"Saved in {out} after {seconds:.1f} s. Next: aleator predict {out} NEW_TABLE --out predictions.csv"), soft_wrap=True
    )
