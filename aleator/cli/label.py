"""`aleator label`: which rows of a pool to label next, written as a sheet to fill in; the filled sheet continues."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli._common import EXIT_CODES, console, guarded, note, print_json

LABELS = "labels.csv"  # all labels so far, beside the fit
ROW, GAIN, POOL = "row", "gain", "pool"  # columns of ours in sheets and in LABELS, as `ours` names them
HELP = f"""Choose the rows of POOL worth labelling next, by what a fit does not know, and write them as a sheet with an empty column for the label.

Fill the column in and pass the sheet back with --labelled: the fit in DIRECTORY learns from it (DIRECTORY/labels.csv keeps all labels) and
the next rows are written. A row is never asked for twice, nor one that has a label in POOL already.

{EXIT_CODES}
"""


@guarded
def command(
    directory: Annotated[Path, typer.Argument(help="A directory written by `aleator fit`.")],
    pool: Annotated[Path, typer.Argument(help="CSV, TSV or Parquet file of unlabelled rows with the columns of the fit.")],
    num: Annotated[int, typer.Option("--n", min=1, help="How many rows to choose.")] = 10,
    out: Annotated[Path, typer.Option(help="The sheet to fill in: .csv, .tsv or .parquet.")] = Path("to_label.csv"),
    labelled: Annotated[Path | None, typer.Option(help="A filled sheet: the fit learns from it first.")] = None,
    data: Annotated[Path | None, typer.Option(help="The training table, where it is no longer where `aleator fit` found it.")] = None,
    acquisition: Annotated[
        str | None,
        typer.Option(help="Classes: batch_bald (default), bald, entropy, epig, …; numbers: variance (default), epig, …; random."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the sheet.")] = False,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    import aleator as al
    from aleator import _random
    from aleator._errors import DataError, message
    from aleator.cli import _place, predict

    predict.check_output(out, force)
    screen = console(to_json)
    fit = predict.load(directory)
    frame, x, notes = predict.read(pool, fit.preprocessor)
    for text in notes:
        note(text)
    key_fit, key_choose = _random.split(_random.as_key(seed), 2)
    known = read_labels(directory, fit.preprocessor, frame, pool)
    if labelled is not None:
        fresh = filled(labelled, fit.preprocessor, frame, known)
        with _place.claimed(directory):
            known = {**known, **fresh}
            if fresh:
                fit = learn(key_fit, fit, directory, data, x, known, fresh)
                _place.replace(directory, lambda place: save(place, fit, frame, known, directory))
        screen.print(f"Learned from {len(fresh)} new labels ({len(known)} in all).", soft_wrap=True)
    taken = excluded(frame, x, fit.preprocessor, known, trained(fit.preprocessor, directory, data))
    left = len(frame) - len(taken)
    if left < num:
        if not left:
            done = {"rows": [], "labels": len(known), "out": None, "status": "The whole pool is labelled."}
            print_json(done) if to_json else screen.print(done["status"])
            return
        note(f"{left} unlabelled rows are left: all of them")
    if num > MOST and acquisition is None:
        raise DataError(message("This is too much to ask for at once.", f"--n {num}", f"at most {MOST}", "ask for fewer rows at a time"))
    batch = al.active.choose(key_choose, fit, x, min(num, left), acquisition, taken)
    predict.write(sheet_of(frame.iloc[batch.rows], fit.preprocessor.target, batch, None if out.suffix.lower() == ".parquet" else ""), out)
    if to_json:
        print_json({"rows": batch.rows + 1, "gain": batch.value, "unit": unit(fit), "labels": len(known), "unlabelled": left, "out": out})
        return
    rows = ", ".join(map(str, batch.rows[:10] + 1)) + (" …" if len(batch.rows) > 10 else "")
    words = f"{len(batch.rows)} of {left} unlabelled rows in {out}: {rows} (gain: {unit(fit)}, higher teaches more)"
    screen.print(words, markup=False, soft_wrap=True)
    again = f"aleator label {directory} {pool} --labelled {out} --out NEXT.csv"
    screen.print(f"Fill in the column {fit.preprocessor.target!r}, then: {again}", markup=False, soft_wrap=True)


MOST = 1000  # rows of a batch: choosing them jointly costs their number squared


def ours(name: str, target: str) -> str:
    """What a column of ours is called beside a target that may have its name."""
    return f"{name} (sheet)" if name == target else name


def sheet_of(rows: Any, target: str, batch: Any, empty: str | None) -> Any:
    """The sheet to fill in: row, an empty label, gain, then the columns of the pool, renamed where they have one of our names."""
    mine = {ours(ROW, target): batch.rows + 1, target: empty, ours(GAIN, target): batch.value}
    sheet = rows.drop(columns=[target], errors="ignore")
    for name in [name for name in sheet.columns if name in mine]:
        new = f"{name} (pool)"
        while new in sheet.columns:
            new += " (pool)"
        sheet = sheet.rename(columns={name: new})
    for place, (name, values) in enumerate(mine.items()):
        sheet.insert(place, name, values)
    return sheet


def unit(fit: Any) -> str:
    return "nats of information" if fit.preprocessor.task == "classification" else "epistemic variance, squared units of the target"


def read_labels(directory: Path, preprocessor: Any, frame: Any, pool: Path) -> dict[int, Any]:
    """{row of the pool: label} of earlier rounds; refused when they were given for another pool."""
    from aleator._errors import DataError, message
    from aleator.tables import read_table

    path = directory / LABELS
    if not path.exists():
        return {}
    row, target, source = ours(ROW, preprocessor.target), preprocessor.target, ours(POOL, preprocessor.target)
    found = read_table(path, (*preprocessor.text_columns, source))
    if not {row, target, source} <= set(found.columns):
        got = f"columns {', '.join(map(repr, found.columns))}"
        raise DataError(message(f"{path} is no list of labels.", got, f"{row}, {target}, {source}", "remove or restore it"))
    if set(found[source]) != {fingerprint(frame, preprocessor)}:
        do = "pass the pool the labels were given for, or fit anew"
        raise DataError(message("The labels so far are of another pool.", str(pool), "the same rows in the same order", do))
    return {int(number) - 1: value for number, value in zip(found[row], found[target], strict=True)}


def fingerprint(frame: Any, preprocessor: Any) -> str:
    """A digest of the pool's inputs: labels refer to its rows by number."""
    import pandas as pd

    from aleator._files import digest

    inputs = frame[[column.name for column in preprocessor.columns]].astype(str)
    return digest(pd.util.hash_pandas_object(inputs, index=False).to_numpy().tobytes())[:16]


def filled(path: Path, preprocessor: Any, frame: Any, known: dict[int, Any]) -> dict[int, Any]:
    """{row: label} of a sheet; rows left empty are skipped, wrong ones refused."""
    import numpy as np

    from aleator._columns import missing_in
    from aleator._errors import DataError, message
    from aleator.tables import read_table

    sheet, target = read_table(path, preprocessor.text_columns), preprocessor.target
    row = ours(ROW, target)
    if row not in sheet.columns or target not in sheet.columns:
        got = f"columns {', '.join(map(repr, sheet.columns))}"
        raise DataError(message(f"{path} is no sheet of labels.", got, f"{row!r} and {target!r}", "pass a sheet written by aleator label"))
    there = sheet[~missing_in(sheet[target])]
    if not len(there):
        raise DataError(message(f"{path} has no labels.", f"an empty column {target!r}", "labels", "fill it in"))
    rows = there[row]
    try:
        numbers = np.asarray(rows, np.float64)
    except (TypeError, ValueError):
        numbers = np.full(len(rows), np.nan)
    if not np.all((numbers == np.round(numbers)) & (numbers >= 1) & (numbers <= len(frame))):
        bad = rows.iloc[int(np.argmin((numbers == np.round(numbers)) & (numbers >= 1) & (numbers <= len(frame))))]
        raise DataError(
            message(f"{path} names a row that is not there.", repr(bad), f"1 to {len(frame)}", f"do not change the column {row}")
        )
    places = numbers.astype(np.int64) - 1
    if len(set(places.tolist())) < len(places):
        raise DataError(message(f"{path} labels a row twice.", "a row number that repeats", "one label a row", "remove one of them"))
    preprocessor.encode_target(there)  # a label that cannot be one is refused by name
    return {place: value for place, value in zip(places.tolist(), there[target], strict=True) if place not in known}


def learn(key: Any, fit: Any, directory: Path, data: Path | None, x: Any, known: dict[int, Any], fresh: dict[int, Any]) -> Any:
    """The fit with the new labels: updated exactly where the method can, fitted again to the training table and all labels where not."""
    import numpy as np

    import aleator as al
    from aleator import _random

    several = hasattr(fit, "fits")
    fits = dict(fit.fits) if several else {"": fit}
    exact = {name: getattr(one.posterior, "stats", None) is not None or hasattr(one.posterior, "joined") for name, one in fits.items()}
    new = np.array(list(fresh)), encoded(fit.preprocessor, fresh.values())
    every = np.array(list(known)), encoded(fit.preprocessor, known.values())
    before = None if all(exact.values()) else training(fit.preprocessor, directory, data)
    made = {}
    for key_one, (name, one) in zip(_random.split(key, len(fits)), fits.items(), strict=True):
        if exact[name]:
            made[name] = one.update((x[new[0]], new[1]))
        else:
            assert before is not None
            rows = np.concatenate([before[0], x[every[0]]]), np.concatenate([before[1], every[1]])
            made[name] = al.fit(key_one, one.model, rows, one.method)
        keep = {"table": one.manifest["table"]} if "table" in one.manifest else {}
        record = made[name].manifest | keep | {"labels": len(known)}
        made[name] = dataclasses.replace(made[name], preprocessor=fit.preprocessor, manifest=record)
    if not several:
        return made[""]
    gone = {name: value for name, value in fit.manifest.items() if name != "held_out_scores"}
    return dataclasses.replace(fit, fits=made, manifest=gone | {"labels": len(known)})


def encoded(preprocessor: Any, values: Any) -> Any:
    import pandas as pd

    return preprocessor.encode_target(pd.DataFrame({preprocessor.target: list(values)}))


def training(preprocessor: Any, directory: Path, data: Path | None) -> tuple[Any, Any]:
    """(x, y) of the training table, from --data or where config.json says it was."""
    import json

    from aleator._columns import missing_in
    from aleator._errors import DataError, message
    from aleator.cli import _place
    from aleator.tables import read_table

    if data is None:
        config = directory / _place.CONFIG
        try:
            data = Path(json.loads(config.read_text())["table"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            data = None
        if data is None or not data.is_file():
            got = "no table at " + str(data) if data is not None else f"no {config.name} in {directory}"
            raise DataError(message("The training table is needed to learn from labels.", got, "the table", "pass it with --data"))
    frame = read_table(data, preprocessor.text_columns)
    if preprocessor.target in frame.columns:
        frame = frame[~missing_in(frame[preprocessor.target])]
    return preprocessor.transform(frame)[0], preprocessor.encode_target(frame)


def trained(preprocessor: Any, directory: Path, data: Path | None) -> Any:
    """Inputs of the training table where it is still to be found; no rows where it is not."""
    import numpy as np

    from aleator._errors import DataError

    try:
        return training(preprocessor, directory, data)[0]
    except DataError:
        if data is not None:
            raise
        return np.zeros((0, len(preprocessor.feature_names)))


def excluded(frame: Any, x: Any, preprocessor: Any, known: dict[int, Any], before: Any) -> Any:
    """Rows not to ask for: labelled ones, rows equal to them or to a row of `before`, and rows that have a label in the pool itself."""
    import numpy as np

    from aleator._columns import missing_in

    gone: Any = np.zeros(len(frame), bool)
    if preprocessor.target in frame.columns:
        gone |= ~np.asarray(missing_in(frame[preprocessor.target]))
    gone[list(known)] = True
    if gone.any() or len(before):
        places = np.unique(np.concatenate([x, before]), axis=0, return_inverse=True)[1].reshape(-1)
        own, others = places[: len(x)], places[len(x) :]
        gone |= np.isin(own, np.concatenate([own[gone], others]))
    return np.flatnonzero(gone)


def save(place: Path, fit: Any, frame: Any, known: dict[int, Any], directory: Path) -> None:
    """Fit, labels and the configuration it had."""
    import shutil

    import pandas as pd

    from aleator.cli import _place

    fit.save(place)
    target, pool = fit.preprocessor.target, fingerprint(frame, fit.preprocessor)
    table = pd.DataFrame({ours(ROW, target): [row + 1 for row in known], target: list(known.values()), ours(POOL, target): pool})
    table.to_csv(place / LABELS, index=False)
    if (directory / _place.CONFIG).exists():
        shutil.copy(directory / _place.CONFIG, place / _place.CONFIG)
