"""`aleator fit`: from a table to a saved fit, with an honest score on rows it has not seen."""

from __future__ import annotations

import enum
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli._common import command_again, console, guarded, note, print_json

CHECKPOINT_SECONDS = 5.0


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


@guarded
def command(
    table: Annotated[Path, typer.Argument(help="CSV, TSV or Parquet file.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    out: Annotated[Path, typer.Option(help="Directory to save the fit in.")],
    method: Annotated[
        str, typer.Option(help="How to infer: see `aleator methods`; `auto` tries several within --budget and stacks them.")
    ] = "ensemble",
    budget: Annotated[str, typer.Option(help="Time for `--method auto`, such as 90s or 10m.")] = "60s",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A hyper-parameter as key=value; may be repeated.")] = None,
    task: Annotated[Task | None, typer.Option(help="Overrules what the target column looks like.")] = None,
    hidden: Annotated[str, typer.Option(callback=widths, help="Widths of the hidden layers of networks, e.g. 50,50.")] = "50",
    prior_scale: Annotated[float | None, typer.Option(help="Prior scale of the weights (of columns as standardised).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    holdout: Annotated[
        bool, typer.Option("--holdout/--no-holdout", help="Keep 20 % of the rows for a score, or fit all rows and print none.")
    ] = True,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Write what an interrupted run needs to continue.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run with the same options.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier fit in the output directory.")] = False,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Fit a table and save the result."""
    from aleator.cli import _road, _scores

    chosen_settings = keys_and_values(settings)
    began = time.perf_counter()
    screen = console(to_json)
    check_output(out, force)
    several = method.lower() == "auto"
    if several:
        check_auto(budget, chosen_settings, checkpoint or resume)
    else:
        _road.method(method, chosen_settings, 1)  # a slip in the settings is reported before the table is read
    key_fit, key_predict, split_seed = _road.keys(seed)
    train, held, notes = prepare(table, target, None if task is None else str(task), split_seed, holdout)
    preprocessor, x, y = train
    num_classes, sizes = len(preprocessor.labels), hidden_sizes(hidden)
    notes += list(preprocessor.notes)
    facts = inferred(preprocessor, table, len(x), 0 if held is None else len(held), x.shape[1])
    place = out.with_name(out.name + ".checkpoint") if checkpoint or resume else None
    run: dict[str, Any] = {"checkpoint": place, "checkpoint_every": CHECKPOINT_SECONDS, "resume": resume} if place else {}
    try:
        print_inferred(screen, facts, notes)
        if several:
            fit: Any = fit_several(
                screen, key_fit, preprocessor, x, y, _road.auto_methods(preprocessor.task, x, num_classes, sizes, prior_scale), budget
            )
        else:
            chosen = _road.method(method, chosen_settings, len(x))
            candidates = _road.models(chosen, preprocessor.task, x.shape[1], num_classes, sizes, prior_scale)
            fit = _road.fit(key_fit, candidates, x, y, chosen, preprocessor, **run)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_to_continue(place)) from None
    lines = []
    if held is not None:
        predicted = fit.predict(key_predict, held.drop(columns=target))
        lines = _scores.scores(predicted, preprocessor.invert_target(preprocessor.encode_target(held)), preprocessor.task, target)
    fit = _road.with_record(fit, {"table": facts, "held_out_scores": _scores.as_json(lines)})
    fit.save(out)
    if place is not None:
        remove_checkpoint(place)
    seconds = time.perf_counter() - began
    if to_json:
        print_json(
            {
                **facts,
                "notes": notes,
                "method": repr(fit.method),
                "model": repr(fit.model),
                "scores": _scores.as_json(lines),
                "status": fit.status,
                "seconds": seconds,
                "out": out,
            }
        )
        return
    report(screen, fit, lines, facts, out, seconds)


def check_auto(budget: str, settings: list[str], checkpoint: bool) -> None:
    """Refuse what `--method auto` cannot do before the table is read."""
    from aleator._errors import MethodError, message
    from aleator.auto import seconds_of

    seconds_of(budget)
    if settings or checkpoint:
        got = "--set" if settings else "--checkpoint or --resume"
        raise MethodError(message("auto chooses its own settings and runs short.", got, "--budget only", "name one method to set it up"))


def fit_several(screen: Any, key: Any, preprocessor: Any, x: Any, y: Any, methods: dict[str, Any], budget: str) -> Any:
    """Several methods within the budget, stacked; each is told of as it ends."""
    from rich.markup import escape

    from aleator.auto import Entry, auto

    def show(entry: Entry) -> None:
        told = entry.note or f"{entry.score:.3f} ± {entry.stderr:.3f} nats per held-out row (higher is better)"
        screen.print(escape(f"  {entry.name:<9} {entry.seconds:6.1f} s  {told}"), soft_wrap=True)

    return auto(key, None, (x, y), budget, methods, report=show).with_preprocessor(preprocessor)


def check_output(out: Path, force: bool) -> None:
    """Refuse an output directory before the work, and not after it."""
    from aleator._errors import StoreError, message
    from aleator.store import AUTO_NAME, JSON_NAME

    if not out.exists():
        return
    if not out.is_dir():
        raise StoreError(message("A fit is saved to a directory.", f"{out} is a file", "a new directory", "choose another --out"))
    if (out / JSON_NAME).exists() or (out / AUTO_NAME).exists():
        if not force:
            raise StoreError(
                message("There is a fit already.", str(out), "a new directory", "choose another --out, or add --force to replace it")
            )
    elif any(out.iterdir()):
        raise StoreError(
            message("The directory holds something else.", str(out), "a new or empty directory, or an earlier fit", "choose another --out")
        )


def prepare(path: Path, target: str, task: str | None, seed: int, holdout: bool) -> tuple[Any, Any, list[str]]:
    """((preprocessor, x, y) of the training rows, held-out rows or None, notes). The task is inferred from all rows, the rest is not."""
    from aleator._columns import missing_in
    from aleator.cli import _road
    from aleator.tables import Preprocessor, read_table

    frame = read_table(path)
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
        return "Nothing was saved. With --checkpoint an interrupted run can be continued."
    return f"The run so far is in {place}. Continue with: {command_again('--resume')}"


def remove_checkpoint(place: Path) -> None:
    """Only what the run wrote: the file and, if nothing else is in it, the directory."""
    from aleator.loop import CHECKPOINT

    (place / CHECKPOINT).unlink(missing_ok=True)
    if place.is_dir() and not any(place.iterdir()):
        place.rmdir()


def report(screen: Any, fit: Any, lines: list[Any], facts: dict[str, Any], out: Path, seconds: float) -> None:
    from rich.markup import escape

    from aleator.cli import _scores

    screen.print(escape(f"Fitted by {fit.method!r}"), soft_wrap=True)
    screen.print(escape(fit.status), soft_wrap=True)
    if fit.log_evidence is not None:
        screen.print(
            escape(f"Prior {fit.model.prior!r}; log evidence {fit.log_evidence.value:.3f} nats ({fit.log_evidence.kind})"), soft_wrap=True
        )
    if lines:
        screen.print(_scores.table(lines, f"On {facts['rows_held_out']} rows held out (fitted to the other {facts['rows']})"))
    screen.print(
        escape(f"Saved in {out} after {seconds:.1f} s. Next: aleator predict {out} NEW_TABLE --out predictions.csv"), soft_wrap=True
    )
