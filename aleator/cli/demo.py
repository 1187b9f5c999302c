"""`aleator demo`: three methods on bundled data by cross-validation, and a picture of both kinds of uncertainty."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli._common import console, guarded, print_json
from aleator.cli.fit import keys_and_values

METHODS = ("exact", "map", "ensemble")
TARGET = "progression"
GAP = (-0.7, 1.3)  # the picture's region without data
PICTURE_STEPS, PICTURE_MEMBERS = 1500, 10


@guarded
def command(
    out: Annotated[Path, typer.Option("--out", help="Directory for the files.")] = Path("demo_output"),
    folds: Annotated[int, typer.Option(min=2, max=50, help="Folds of the cross-validation.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value for the ensemble, and for MAP where it applies.")] = None,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Fit bundled data with Exact, MAP and Ensemble; print a table; draw a picture."""
    chosen_settings = keys_and_values(settings)
    from aleator import defaults
    from aleator.cli import _road

    began = time.perf_counter()
    screen = console(to_json)
    defaults.method("ensemble", chosen_settings, 1)  # a slip in the settings is reported before any work
    out.mkdir(parents=True, exist_ok=True)
    (out / ".gitignore").write_text("*\n")  # results of a run do not belong into a repository
    frame = diabetes_frame()
    frame.to_csv(out / "diabetes.csv", index=False)
    screen.print(
        f"Diabetes data of scikit-learn: {len(frame)} patients, {frame.shape[1] - 1} measurements; target: {TARGET} after one year."
    )
    rows = []
    for name in METHODS:
        with screen.status(f"{name}: {folds} folds"):
            rows.append(cross_validate(frame, name, folds, seed, chosen_settings))
    screen.print(results_table(rows, folds))
    with screen.status("fitting all rows, drawing"):
        saved = fit_frame(frame, "ensemble", _road.keys(seed)[0], chosen_settings)
        saved.save(out / "diabetes_fit")
        picture = draw(out / "demo.png", seed)
    document = {
        "data": "diabetes",
        "rows": len(frame),
        "folds": folds,
        "seed": seed,
        "results": rows,
        "seconds": time.perf_counter() - began,
    }
    files = {"picture": picture, "results": out / "demo.json", "fit": out / "diabetes_fit", "table": out / "diabetes.csv"}
    (out / "demo.json").write_text(json.dumps(document, indent=1) + "\n")
    if to_json:
        print_json(document | {"files": {name: str(path) for name, path in files.items()}})
        return
    screen.print(f"Done in {document['seconds']:.0f} s. Files:")
    for name, path in files.items():
        screen.print(f"  {name:<8} {path}", soft_wrap=True)
    screen.print(f"Next: aleator show {files['fit']}", soft_wrap=True)
    screen.print(f"      aleator predict {files['fit']} {files['table']} --out {out / 'predictions.csv'}", soft_wrap=True)


def diabetes_frame() -> Any:
    import pandas as pd

    from aleator import datasets

    x, y, names = datasets.diabetes()
    return pd.DataFrame(x, columns=list(names)).assign(**{TARGET: y})


def fit_frame(frame: Any, name: str, key: Any, settings: list[str]) -> Any:
    """One fit of a table by the command line's own defaults, but for the linear prior: the evidence hardly tells scales apart here."""
    from aleator import _settings, defaults
    from aleator.cli import _road
    from aleator.tables import Preprocessor

    preprocessor, x, y = Preprocessor.fit(frame, TARGET, "regression")
    method = defaults.method(name, settings if name == "ensemble" else _settings.that_fit(_settings.find(name), settings), len(frame))
    candidates = defaults.models(method, "regression", x.shape[1], 0, (50,), 1.0)
    return _road.fit(key, candidates, x, y, method, preprocessor, progress=False)


def cross_validate(frame: Any, name: str, num_folds: int, seed: int, settings: list[str]) -> dict[str, Any]:
    """Each score's mean over folds and its standard error, the standard deviation over folds / √folds; and the seconds it all took."""
    import numpy as np

    import aleator as al
    from aleator.cli import _road
    from aleator.cli._scores import scores

    began = time.perf_counter()
    found = []
    for number, (train, test) in enumerate(al.folds(seed, len(frame), num_folds)):
        key_fit, key_predict, _ = _road.keys(seed + number)
        made = fit_frame(frame.iloc[train], name, key_fit, settings)
        held = frame.iloc[test]
        predicted = made.predict(key_predict, held.drop(columns=TARGET))
        found.append(scores(predicted, held[TARGET].to_numpy(), "regression", TARGET))
    values = np.array([[score.value for score in fold] for fold in found])
    errors = values.std(axis=0, ddof=1) / np.sqrt(num_folds)
    keys = ("log_likelihood", "rmse", "coverage_90")
    row = {
        key: {"mean": float(m), "stderr": float(e), "folds": v.tolist()}
        for key, m, e, v in zip(keys, values.mean(axis=0), errors, values.T, strict=True)
    }
    return {"method": name, **row, "seconds": time.perf_counter() - began}


def results_table(rows: list[dict[str, Any]], num_folds: int) -> Any:
    from rich.table import Table

    from aleator.cli._scores import as_text

    table = Table(title=f"Held-out performance, mean ± standard error over {num_folds} folds", title_justify="left")
    table.add_column("method")
    for heading in (
        "log-likelihood\nnats per row, ↑",
        f"RMSE\nunits of {TARGET}, ↓",
        "90 % interval coverage\n% of rows, near 90",
        f"seconds\nall {num_folds} folds",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [as_text(row[key]["mean"], row[key]["stderr"]) for key in ("log_likelihood", "rmse", "coverage_90")]
        table.add_row(row["method"], *cells, f"{row['seconds']:.1f}")
    return table


def picture_data() -> tuple[Any, Any]:
    """100 points with a gap in x and noise that grows with x; the same for every seed, so that the picture can be talked about."""
    import numpy as np

    generator = np.random.Generator(np.random.Philox(3))
    x = np.concatenate([generator.uniform(-3.0, GAP[0], 55), generator.uniform(GAP[1], 3.0, 45)])[:, None]
    noise = (0.08 + 0.07 * (x + 3.0)) * generator.normal(size=x.shape)
    return x, (np.sin(1.6 * x) + 0.25 * x + noise)[:, 0]


def picture_fits(x: Any, y: Any, seed: int) -> dict[str, Any]:
    """An exact Bayesian linear regression on a basis, and a deep ensemble."""
    import numpy as np

    import aleator as al

    basis = al.features.RBF(tuple(np.linspace(-4.5, 4.5, 19)), 0.7)
    linear = al.LinearModel(basis, al.Gaussian(al.InverseGamma(1.0, 0.01)), al.Normal(4.0), scaled_by_noise=True)
    # A smooth activation and a wide prior: what happens in the gap is then up to each member.
    network = al.networks.MLP(1, (50, 50), 2, "silu")
    deep = al.BNN(network, al.HeteroscedasticGaussian(), al.Normal(1.0))
    method = al.Ensemble(al.MAP(num_steps=PICTURE_STEPS, learning_rate=3e-3, clip=1.0), PICTURE_MEMBERS)
    return {
        "Exact: Bayesian linear regression on 19 bumps": al.fit(seed, linear, (x, y), al.Exact()),
        f"Ensemble: {PICTURE_MEMBERS} networks that learn the noise": al.fit(seed, deep, (x, y), method, progress=False),
    }


def draw(path: Path, seed: int) -> Path:
    """Both fits side by side: data, functions drawn, both bands; below, the two parts of the uncertainty by themselves."""
    import numpy as np
    from matplotlib.figure import Figure

    from aleator import plots

    x, y = picture_data()
    grid = np.linspace(-4.0, 4.0, 241)[:, None]
    figure = Figure(figsize=(10.0, 5.8), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1))
    for column, (title, made) in enumerate(picture_fits(x, y, seed).items()):
        top, bottom = panels[:, column]
        predicted = made.predict(seed + 1, grid)
        plots.regression(top, grid, predicted, (x, y), made.functions(seed + 2, grid, 10))
        plots.uncertainty(bottom, grid, predicted)
        top.set_title(title, fontsize=11, loc="left")
        bottom.set_xlabel("x")
        for ax in (top, bottom):
            ax.axvspan(*GAP, color="#F2F2F2", zorder=0, linewidth=0)
    first = panels[0, 0]
    first.set(ylim=(-3.0, 3.0), xlim=(-4.0, 4.0), ylabel="y")
    first.annotate("no data", (sum(GAP) / 2, -2.85), ha="center", color="#666666", fontsize=9)
    panels[1, 0].set_ylabel("standard deviation")
    panels[1, 1].legend(frameon=False, fontsize=9, loc="upper left")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return plots.save(figure, path, dpi=110)
