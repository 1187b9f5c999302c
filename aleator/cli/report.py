"""`aleator report`: one page on a saved fit, with what rows of known targets say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli._common import console, guarded, note, print_json


@guarded
def command(
    directory: Annotated[Path, typer.Argument(help="A directory written by `aleator fit` or fit.save.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Table with the target's column, to judge by; rows the fit was trained on are left out where they can be told."),
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the report.")] = Path("report.html"),
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Markdown with pictures beside it, instead of one HTML file.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of posterior draws and permutations.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the report.")] = False,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Write one page on a fit: data, model, health, reliability, uncertainty, strange rows, relevance, what to do next."""
    from aleator import report
    from aleator.cli._scores import as_json
    from aleator.report.sections import advice, worst_light

    out = out.with_suffix(".md") if as_markdown and out.suffix.lower() in (".html", ".htm") else out
    check_output(out, force)
    fit = load(directory)
    facts = report.collect(seed, fit, None if data is None else read(data, fit), directory.resolve().name)
    report.write_document(report.describe(facts), out)
    judged = facts.judged
    if judged is not None and judged.held.seen > 0.05:
        note(f"{100 * judged.held.seen:.0f} % of the rows of {data} were in training: the scores are too good.")
    if to_json:
        print_json(
            {
                "out": out,
                "health": worst_light(facts),
                "advice": list(advice(facts)),
                "rows": 0 if judged is None else judged.held.size,
                "scores": {} if judged is None else as_json(list(judged.scores)),
                "calibration_p": None if judged is None else judged.test.p_value,
                "epistemic_share": None if judged is None or judged.split.share != judged.split.share else judged.split.share,
                "relevance": [] if judged is None else [one._asdict() for one in judged.importances],
                "strange_rows": [] if judged is None else [int(judged.held.numbers[one.place]) for one in judged.strange.rows],
            }
        )
        return
    screen = console(False)
    for item in advice(facts):
        screen.print(f"- {item}", markup=False, soft_wrap=True)
    screen.print(f"Report in {out}", markup=False, soft_wrap=True)


def check_output(out: Path, force: bool) -> None:
    from aleator import report
    from aleator._errors import DataError, message

    report.check_path(out)
    if out.is_dir():
        raise DataError(message("The report goes to a file.", f"{out} is a directory", "a file name", "add a name such as report.html"))
    if out.exists() and not force:
        raise DataError(message("The report exists.", str(out), "a new file", "choose another --out, or add --force to overwrite it"))


def load(directory: Path) -> Any:
    import aleator as al

    return al.load(directory)


def read(path: Path, fit: Any) -> Any:
    """The table as the fit reads it."""
    from aleator._errors import StoreError, message
    from aleator.tables import read_table

    if fit.preprocessor is None:
        do = "leave --data out, or use aleator.report.write(key, fit, (x, y), path) in Python"
        raise StoreError(message("The fit was made from arrays.", "no stored columns", "a fit by `aleator fit`", do))
    return read_table(path, fit.preprocessor.text_columns)
