"""Random tables and random command lines, most of them wrong in one way or two: none may end in a traceback or a defect.

`case(seed, place)` writes what it needs and returns the words of one command; the same seed gives the same case. Fits are by cheap methods.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

ROWS = 24
NAMES = ("a", "größe, in m", 'say "x"', "日本", "a b\tc", "1", "row", "y ", "")
WORDS = ("", "0", "-1", "1e999", "nan", "x", "ÿ", "--", "1,2", "None", "[]", "9" * 30, "exact", "y", "./", "\n")


def frame(generator: np.random.Generator) -> pd.DataFrame:
    """A good small table, by kind of column and of target."""
    table = {"a": generator.normal(size=ROWS), "b": generator.normal(size=ROWS).round(2)}
    target = generator.choice(["numbers", "numbers", "numbers", "classes", "whole"])
    y = 2 * table["a"] + generator.normal(size=ROWS)
    table["y"] = {"numbers": y, "classes": np.where(y > 0, "up", "down"), "whole": (y > 0).astype(int) + 3}[target]
    return pd.DataFrame(table)


def spoiled(generator: np.random.Generator, table: pd.DataFrame) -> pd.DataFrame:
    """One thing about the table changed."""
    if not table.columns.is_unique or table.shape[1] == 0:
        return table
    number, column = len(table), str(generator.choice(table.columns))
    some = generator.random(number) < 0.3
    choices = [
        lambda: table,
        lambda: table,
        lambda: table.assign(**{column: table[column].astype(object).where(~some, None)}),
        lambda: table.assign(**{column: table[column].astype(object).where(~some, "word")}),
        lambda: table.assign(**{column: "same"}),
        lambda: table.assign(**{column: np.nan}),
        lambda: table.assign(**{column: np.inf}),
        lambda: table.assign(**{column: generator.normal(size=number) * 1e300}),
        lambda: table.assign(**{column: generator.normal(size=number) * 1e-300}),
        lambda: table.assign(**{column: pd.date_range("2020-01-01", periods=number).astype(str)}),
        lambda: table.assign(**{column: [f"id{i}" for i in range(number)]}),
        lambda: table.assign(**{column: some}),
        lambda: table.assign(**{column: generator.integers(-(2**62), 2**62, number)}),
        lambda: table.assign(**{column: [[1, 2]] * number}),
        lambda: table.rename(columns={column: str(generator.choice(NAMES))}),
        lambda: table.set_axis(["a", "a", "y"][: table.shape[1]] + list(table.columns[3:]), axis=1),
        lambda: table.head(int(generator.choice([0, 1, 2, 5]))),
        lambda: table.drop(columns=column),
        lambda: table[table.columns[::-1]],
    ]
    return choices[int(generator.integers(len(choices)))]()


def write(generator: np.random.Generator, table: pd.DataFrame, place, name: str):
    """The table as a file, now and then broken as one."""
    end = str(generator.choice([".csv", ".csv", ".csv", ".tsv", ".parquet", ".csv.gz", ".txt", ".CSV", ""]))
    path = place / f"{name}{end}"
    try:
        if end == ".parquet":
            table.to_parquet(path)
        else:
            table.to_csv(
                path, index=bool(generator.random() < 0.1), sep="\t" if end == ".tsv" else str(generator.choice([",", ",", ",", ",", ";"]))
            )
    except Exception:  # what pandas cannot write is not the question
        path.write_text("a,y\n1,2\n")
    if generator.random() < 0.15:
        content = path.read_bytes()
        broken = [
            b"",
            content[: len(content) // 2],
            content + b"\x00\xff",
            b"\xef\xbb\xbf" + content,
            content.replace(b",", b",,"),
            b"\n\n" + content,
        ]
        path.write_bytes(broken[int(generator.integers(len(broken)))])
    if generator.random() < 0.03:
        path = place / "absent.csv"
    return path


def damaged(generator: np.random.Generator, saved, place):
    """A copy of a saved fit, most often with one file cut, altered, emptied or gone."""
    import shutil

    copy = place / "saved"
    shutil.copytree(saved, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    path = files[int(generator.integers(len(files)))]
    content = path.read_bytes()
    at = int(generator.integers(max(1, len(content))))
    kind = int(generator.integers(8))
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(content[:at])
    elif kind == 2:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << int(generator.integers(8))]) + content[at + 1 :])
    elif kind == 3:
        path.write_bytes(b"{}" if path.suffix == ".json" else b"")
    elif kind == 4:
        path.write_bytes(b"[" * 100_000 if path.suffix == ".json" else b"\xff" * 64)
    return copy


def options(generator: np.random.Generator, known: dict[str, list[str]], most: int) -> list[str]:
    """A few of the options, values right or wrong."""
    names = list(known)
    chosen = generator.choice(len(names), size=int(generator.integers(0, most + 1)), replace=False)
    words = []
    for place in chosen:
        name = names[place]
        if not known[name]:
            words.append(name)
        else:
            values = known[name] if generator.random() < 0.7 else WORDS
            words += [name, str(generator.choice(values))]
    if generator.random() < 0.03:
        words.append(str(generator.choice(["--unheard-of", "-x", "stray", "--", "--help", "--version"])))
    return words


FIT = {
    "--task": ["regression", "classification"],
    "--seed": ["1", "2"],
    "--hidden": ["3", "2,2"],
    "--prior-scale": ["1.0", "0.1"],
    "--set": ["batch_size=8", "num_steps=3", "nothing=1", "a=b=c", "=", "batch_size=none"],
    "--budget": ["1s", "2s"],
    "--no-holdout": [],
    "--holdout": [],
    "--no-checkpoint": [],
    "--resume": [],
    "--force": [],
    "--json": [],
}


def case(seed: int, place, saved) -> list[str]:
    """The words of one command; `saved`: directories of good fits."""
    generator = np.random.default_rng(seed)
    verb = str(
        generator.choice(
            ["fit", "compare", "predict", "label", "audit", "show", "methods", "nonsense"], p=[0.4, 0.1, 0.16, 0.12, 0.1, 0.06, 0.04, 0.02]
        )
    )
    table = spoiled(generator, spoiled(generator, frame(generator)))
    path = write(generator, table, place, "t")
    fit = damaged(generator, saved[int(generator.integers(len(saved)))], place) if verb in ("predict", "label", "audit", "show") else None
    target = str(generator.choice(["y", "y", "y", "y", "a", *NAMES]))
    if verb == "fit":
        method = str(generator.choice(["exact", "exact", "exact", "Exact", "exakt", ""]))
        return ["fit", str(path), "--target", target, "--out", str(place / "out"), "--method", method, *options(generator, FIT, 3)]
    if verb == "compare":
        known = {name: FIT[name] for name in ("--task", "--seed", "--prior-scale", "--budget", "--resume", "--json", "--force")}
        methods = str(generator.choice(["linear", "exact,linear", "exact", "linear,linear", "gq", ","]))
        return [
            "compare",
            str(path),
            "--target",
            target,
            "--methods",
            methods,
            "--budget",
            "1s",
            *options(generator, known | {"--out": [str(place / "c")]}, 3),
        ]
    if verb == "predict":
        known = {"--level": ["0.5", "0.99"], "--seed": ["3"], "--force": [], "--json": []}
        return [
            "predict",
            str(fit),
            str(path),
            "--out",
            str(place / f"p{generator.choice(['.csv', '.csv', '.tsv', '.parquet', '.xls'])}"),
            *options(generator, known, 2),
        ]
    if verb == "label":
        known = {
            "--n": ["1", "3", "100"],
            "--seed": ["3"],
            "--labelled": [str(path)],
            "--acquisition": ["random", "variance"],
            "--json": [],
            "--data": [str(path)],
        }
        return ["label", str(fit), str(path), "--out", str(place / "s.csv"), *options(generator, known, 3)]
    if verb == "audit":
        known = {"--data": [str(path)], "--seed": ["3"], "--json": []}
        return ["audit", str(fit), "--oracle", "0", *options(generator, known, 3)]
    if verb == "show":
        return ["show", str(fit), *options(generator, {"--json": []}, 1)]
    return [verb, *options(generator, {"--json": [], "map": [], "nix": []}, 2)]
