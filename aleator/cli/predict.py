"""`aleator predict`: a saved fit applied to a table, the uncertainty split into its two parts, written by file type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli._common import console, guarded, note, print_json

FORMATS = (".csv", ".tsv", ".tab", ".parquet")


@guarded
def command(
    directory: Annotated[Path, typer.Argument(help="A directory written by `aleator fit`.")],
    table: Annotated[Path, typer.Argument(help="CSV, TSV or Parquet file with the same columns; their order does not matter.")],
    out: Annotated[Path, typer.Option(help="File for the predictions: .csv, .tsv or .parquet.")],
    level: Annotated[float, typer.Option(help="Probability of the interval lower … upper.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the posterior draws.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Predict a table: one row of predictions per row of it."""
    if not 0 < level < 1:
        raise typer.BadParameter(f"{level}: a number strictly between 0 and 1, such as 0.9.", param_hint="--level")
    from aleator.cli import _scores

    check_output(out, force)
    fit = load(directory)
    preprocessor = fit.preprocessor
    frame, x, notes = read(table, preprocessor)
    for text in notes:
        note(text)
    predicted = fit.predict(seed, x)
    result = columns(predicted, preprocessor, level)
    write(result, out)
    lines, remark = score(lambda rows: predicted if rows.all() else fit.predict(seed, x[rows]), frame, preprocessor, level)
    if remark:
        note(remark)
    if to_json:
        document = {
            "rows": len(result),
            "columns": list(result.columns),
            "notes": list(notes),
            "scores": _scores.as_json(lines),
            "out": out,
        }
        print_json(document)
        return
    screen = console(False)
    if lines:
        count = known_rows(frame, preprocessor).sum()
        title = f"{table.name} holds {preprocessor.target!r} too: scores on {count} rows (honest for rows the fit has not seen)"
        screen.print(_scores.table(lines, title))
    screen.print(f"{len(result)} predictions in {out}: {', '.join(map(str, result.columns))}", markup=False, soft_wrap=True)


def check_output(out: Path, force: bool) -> None:
    from aleator._errors import DataError, message

    if out.suffix.lower() not in FORMATS:
        raise DataError(
            message(
                "The predictions cannot be written.",
                f"a file name ending in {out.suffix!r}",
                f"one of {', '.join(FORMATS)}",
                "rename --out",
            )
        )
    if out.is_dir():
        raise DataError(
            message("The predictions go to a file.", f"{out} is a directory", "a file name", "add a name such as predictions.csv")
        )
    if out.exists() and not force:
        raise DataError(message("The output file exists.", str(out), "a new file", "choose another --out, or add --force to overwrite it"))


def load(directory: Path) -> Any:
    """The fit, which must have been made from a table."""
    import aleator as al
    from aleator._errors import StoreError, message

    fit = al.load(directory)
    if fit.preprocessor is None:
        raise StoreError(
            message(
                "The fit was made from arrays.",
                "no stored columns",
                "a fit by `aleator fit`",
                "use al.load(directory).predict(key, x) in Python",
            )
        )
    return fit


def read(path: Path, preprocessor: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """(table, features, notes): text columns are read as text, whatever they look like in this table."""
    from aleator.tables import read_table

    frame = read_table(path, preprocessor.text_columns)
    x, notes = preprocessor.transform(frame)
    return frame, x, notes


def columns(predicted: Any, preprocessor: Any, level: float) -> Any:
    """The predictions as a table."""
    import numpy as np
    import pandas as pd

    if preprocessor.task == "regression":
        aleatoric, epistemic = predicted.aleatoric, predicted.epistemic
        lower, upper = predicted.interval(level)
        parts = {
            "mean": predicted.mean,
            "std": np.sqrt(aleatoric + epistemic),
            "aleatoric_std": np.sqrt(aleatoric),
            "epistemic_std": np.sqrt(epistemic),
        }
        return pd.DataFrame({**parts, "lower": lower, "upper": upper})
    probs = predicted.probs
    parts = {"label": preprocessor.invert_target(probs.argmax(axis=1))}
    parts |= {f"probability_{label}": probs[:, number] for number, label in enumerate(preprocessor.labels)}
    return pd.DataFrame({**parts, "entropy": predicted.entropy, "mutual_information": predicted.mutual_information})


def write(result: Any, out: Path) -> None:
    """CSV, TSV or Parquet by the extension; numbers as they are, to the last digit. The file appears whole or not at all."""
    import os

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix.lower() == ".parquet":
            result.to_parquet(partial, index=False)
        else:
            result.to_csv(partial, index=False, sep="," if out.suffix.lower() == ".csv" else "\t")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def known_rows(frame: Any, preprocessor: Any) -> Any:
    """Which rows have a value of the target, (n,) bool; None when the table lacks it."""
    from aleator._columns import missing_in

    return ~missing_in(frame[preprocessor.target]) if preprocessor.target in frame.columns else None


def score(predict: Callable[[Any], Any], frame: Any, preprocessor: Any, level: float) -> tuple[list[Any], str]:
    """Scores on the rows that have a target, predicted by `predict(rows)`; with a remark instead when the target cannot be used."""
    from aleator._errors import DataError
    from aleator.cli import _scores

    known = known_rows(frame, preprocessor)
    if known is None or not known.any():
        return [], ""
    try:
        y = preprocessor.invert_target(preprocessor.encode_target(frame[known]))
    except DataError as error:
        return [], f"no scores: {error}"
    return _scores.scores(predict(known), y, preprocessor.task, preprocessor.target, level), ""
