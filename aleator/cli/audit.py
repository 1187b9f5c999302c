"""`aleator audit`: can this fit be relied on? Traffic lights with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli._common import EXIT_CODES, RED, console, guarded, note, print_json

COLOURS = {"green": "green", "amber": "yellow", "red": "red", "grey": "bright_black"}
SIGNS = {"green": "●", "amber": "▲", "red": "■", "grey": "○"}
HELP = f"""Audit a saved fit: convergence, calibration, predictive checks, fidelity to a long Markov chain, sensitivity to the prior.

--data is a table with the target that the fit has not seen (such as rows kept back); without it only what the fit knows of itself is judged.
Lights: green fine, amber look at it, red do not rely on it, grey could not be judged. Exit code 3 when a light is red.

{EXIT_CODES}
"""


@guarded
def command(
    directory: Annotated[Path, typer.Argument(help="A directory written by `aleator fit`.")],
    data: Annotated[Path | None, typer.Option(help="A table with the target, unseen by the fit.")] = None,
    oracle: Annotated[str, typer.Option(help="Time for the comparison with a long Markov chain, such as 30s; 0 leaves it out.")] = "30s",
    rows: Annotated[int, typer.Option(min=20, help="Rows of the subsample for that comparison.")] = 100,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")] = 0,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    from aleator._auto import seconds_of
    from aleator.cli import predict
    from aleator.cli._lights import audit, overall

    seconds = 0.0 if oracle.strip() in ("0", "0s") else seconds_of(oracle)
    fit = predict.load(directory)
    frame = None if data is None else predict.read(data, fit.preprocessor)[0]
    screen = console(to_json)
    with screen.status("auditing"):
        lights = audit(seed, fit, frame, seconds, rows)
    worst = overall(lights)
    if to_json:
        print_json({"light": worst, "checks": [light._asdict() for light in lights]})
    else:
        show(screen, directory, lights, worst)
        if data is None:
            note("no --data: calibration and fidelity are judged by what was stored, or not at all")
    if worst == "red":
        raise typer.Exit(RED)


def show(screen: Any, directory: Path, lights: list[Any], worst: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    made = Table(title=escape(f"Audit of {directory}"), title_justify="left", show_lines=True)
    made.add_column("light", no_wrap=True)
    made.add_column("check", no_wrap=True)
    made.add_column("why", overflow="fold")
    for light in lights:
        made.add_row(f"[{COLOURS[light.light]}]{SIGNS[light.light]} {light.light}[/]", light.name, escape(light.why))
    screen.print(made)
    words = {
        "green": "Nothing speaks against relying on it.",
        "amber": "Usable; look at what is amber first.",
        "red": "Do not rely on it before what is red is mended.",
        "grey": "Nothing could be judged.",
    }
    screen.print(f"Overall: [{COLOURS[worst]}]{SIGNS[worst]} {worst}[/]. {words[worst]}", soft_wrap=True)
