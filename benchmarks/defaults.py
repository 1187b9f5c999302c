"""`aleator fit` with all defaults on the four tables bundled with scikit-learn, beside scikit-learn's own models.

    python benchmarks/defaults.py [--only wine] [--folds 5] [--first 2] [--warm]

Every fold: `aleator fit` runs as a program of its own on the training rows (a CSV), without any option, compile time included; its stack
predicts the rows left out. The peers see the same rows, standardised, and are calibrated by their usual means: logistic regression with C chosen by inner
cross-validation, ridge with its penalty so chosen and Gaussian noise of the cross-validated residuals, forests and boosting sigmoid-calibrated (classes) or with
Gaussian noise of cross-validated residuals, Gaussian processes by their own marginal likelihood. Log-likelihood in nats per held-out row, higher is
better. Coverage is that of 90 % intervals, or of sets of classes of probability 90 % (the last class is in by chance, so that 90 % is what calibrated
predictions have). Each finished fold is kept in results/defaults.json; a fold that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results" / "defaults.json"
TABLES = ("breast_cancer", "wine", "diabetes", "digits")
LEVEL = 0.9
GP_ROWS = 600  # the Gaussian process classifier of scikit-learn needs minutes beyond


def table(name):
    """(x, y, whether y are classes)."""
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    return found.data, found.target, name != "diabetes"


def rows_of(name, folds):
    from sklearn.model_selection import KFold, StratifiedKFold

    x, y, classes = table(name)
    kind = StratifiedKFold if classes else KFold
    return list(kind(folds, shuffle=True, random_state=0).split(x, y))


# ---- ours ------------------------------------------------------------------------------------------------------------------------


def ours(name, train, test, cold, budget):
    """Densities and coverage of the held-out rows, wall and processor seconds of `aleator fit`, weights."""
    import pandas as pd

    import aleator as al
    from aleator._auto import in_set

    x, y, classes = table(name)
    frame = pd.DataFrame(x, columns=[f"c{j}" for j in range(x.shape[1])])
    frame["y"] = np.array([f"class {k}" for k in y]) if classes else y
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        frame.iloc[train].to_csv(place / "train.csv", index=False)
        environment = dict(os.environ) | ({"JAX_COMPILATION_CACHE_DIR": str(place / "cache")} if cold else {})
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-m", "aleator.cli", "fit", "train.csv", "--target", "y", "--out", "fit", "--json"]
        command += [] if budget is None else ["--budget", budget]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(done.stderr)
        fit = al.load(place / "fit")
    held = frame.iloc[test]
    predicted = fit.predict(1, held.drop(columns="y"))
    density = predicted.log_prob(held["y"].to_numpy())
    if classes:
        inside = in_set(predicted.probs, predicted.encode(held["y"].to_numpy()))
    else:
        lower, upper = predicted.interval(LEVEL)
        inside = (held["y"].to_numpy() >= lower) & (held["y"].to_numpy() <= upper)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    entries = [(e.name, e.score, e.stderr, e.seconds, e.note) for e in fit.entries]
    return {
        "density": density.tolist(),
        "inside": np.asarray(inside, float).tolist(),
        "wall": wall,
        "processor": processor,
        "weights": fit.weights,
        "entries": entries,
    }


# ---- peers -----------------------------------------------------------------------------------------------------------------------


def classifiers(rows, num_classes):
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel
    from sklearn.linear_model import LogisticRegressionCV

    found = {
        "logistic": LogisticRegressionCV(Cs=np.logspace(-3, 2, 8), cv=5, scoring="neg_log_loss", max_iter=2000),
        "forest": CalibratedClassifierCV(RandomForestClassifier(300, random_state=0), method="sigmoid", cv=5),
        "boosting": CalibratedClassifierCV(HistGradientBoostingClassifier(random_state=0, early_stopping=False), method="sigmoid", cv=3),
    }
    if rows <= GP_ROWS:
        found["process"] = GaussianProcessClassifier(ConstantKernel(10.0) * RBF(5.0), random_state=0)
    else:  # hyper-parameters by the marginal likelihood of a part, then all rows
        found["process"] = _PartTuned(GP_ROWS, num_classes)
    return found


class _PartTuned:
    """A Gaussian process classifier with one kernel for all classes, tuned on a part of the rows: all of them would take tens of minutes."""

    def __init__(self, part, num_classes):
        self.part, self.num_classes = part, num_classes

    def fit(self, x, y):
        from sklearn.gaussian_process import GaussianProcessClassifier
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        some = np.random.default_rng(0).choice(len(x), self.part, replace=False)
        tuned = GaussianProcessClassifier(ConstantKernel(10.0) * RBF(5.0)).fit(x[some], y[some] == 0)
        self.made = GaussianProcessClassifier(tuned.kernel_, optimizer=None).fit(x, y)
        return self

    def predict_proba(self, x):
        return self.made.predict_proba(x)


def regressors():
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.linear_model import RidgeCV

    return {
        "ridge": RidgeCV(np.logspace(-3, 3, 13)),
        "forest": RandomForestRegressor(300, random_state=0),
        "boosting": HistGradientBoostingRegressor(random_state=0, early_stopping=True),
    }


def peers(name, train, test):
    """{peer: (densities, inside)} of the held-out rows."""
    from scipy import stats
    from sklearn.base import clone
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.model_selection import cross_val_predict
    from sklearn.preprocessing import StandardScaler

    from aleator._auto import in_set

    x, y, classes = table(name)
    scaler = StandardScaler().fit(x[train])
    x_train, x_test, y_train, y_test = scaler.transform(x[train]), scaler.transform(x[test]), y[train], y[test]
    found = {}
    if classes:
        for peer, model in classifiers(len(train), len(np.unique(y))).items():
            began = time.process_time()
            probs = model.fit(x_train, y_train).predict_proba(x_test)
            probs = np.clip(probs, 1e-15, None)  # a forest gives zeros
            probs /= probs.sum(axis=1, keepdims=True)
            density = np.log(probs[np.arange(len(y_test)), y_test])
            found[peer] = {"density": density.tolist(), "inside": in_set(probs, y_test).tolist(), "processor": time.process_time() - began}
        return found
    for peer, model in regressors().items():
        began = time.process_time()
        noise = np.sqrt(np.mean((cross_val_predict(clone(model), x_train, y_train, cv=5) - y_train) ** 2))
        mean, scale = model.fit(x_train, y_train).predict(x_test), noise
        found[peer] = _gaussian(stats, mean, scale, y_test, time.process_time() - began)
    began = time.process_time()
    kernel = ConstantKernel(1.0) * RBF(5.0) + WhiteKernel(0.5)
    model = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=1, random_state=0).fit(x_train, y_train)
    mean, scale = model.predict(x_test, return_std=True)  # the white kernel's noise is in it
    found["process"] = _gaussian(stats, mean, scale, y_test, time.process_time() - began)
    return found


def _gaussian(stats, mean, scale, y, seconds):
    density = stats.norm.logpdf(y, mean, scale)
    inside = np.abs(y - mean) <= stats.norm.ppf(0.5 + LEVEL / 2) * scale
    return {"density": density.tolist(), "inside": inside.astype(float).tolist(), "processor": seconds}


# ---- the table -------------------------------------------------------------------------------------------------------------------


def summary(found):
    """Rows of the table: ours, the best peer, the paired difference, coverage, seconds."""
    lines = [
        "| table | rows | ours [nats/row, ↑] | best peer | its score | ours − best peer, paired | 90 % covers [%] | processor [s] | wall [s] | weights |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in TABLES:
        folds = [fold for key, fold in sorted(found.items()) if key.startswith(f"{name}/") and "ours" in fold]
        if not folds:
            continue
        join = lambda part, key, folds=folds: np.concatenate(
            [fold[part][key] if part == "ours" else fold["peers"][part][key] for fold in folds]
        )
        mine, inside = join("ours", "density"), join("ours", "inside")
        scores = {peer: join(peer, "density") for peer in folds[0]["peers"]}
        best = max(scores, key=lambda peer: scores[peer].mean())
        gap = mine - scores[best]
        text = lambda v, factor=1.0: f"{factor * v.mean():.3f} ± {factor * v.std(ddof=1) / np.sqrt(len(v)):.3f}"
        shares = {
            k: np.mean([fold["ours"]["weights"].get(k, 0.0) for fold in folds]) for k in {k for f in folds for k in f["ours"]["weights"]}
        }
        told = ", ".join(f"{k} {v:.2f}" for k, v in sorted(shares.items(), key=lambda item: -item[1]))
        seconds = [max(fold["ours"][kind] for fold in folds) for kind in ("processor", "wall")]
        cover = f"{100 * inside.mean():.1f} ± {100 * inside.std(ddof=1) / np.sqrt(len(inside)):.1f}"
        lines.append(
            f"| {name} | {len(mine)} | {text(mine)} | {best} | {text(scores[best])} | {text(gap)} | {cover} | {seconds[0]:.0f} | {seconds[1]:.0f} | {told} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--first", type=int, default=None, help="only this many of the folds")
    parser.add_argument("--warm", action="store_true", help="use the cache of compiled programs: not the time a newcomer sees")
    parser.add_argument("--budget", help="other than the default: for a busy machine, where 50 s of wall time are few of processor time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in [options.only] if options.only else TABLES:
        for number, (train, test) in enumerate(rows_of(name, options.folds)[: options.first]):
            fold = found.setdefault(f"{name}/{number}", {})
            if "peers" not in fold:
                fold["peers"] = peers(name, train, test)
            if "ours" not in fold:
                fold["ours"] = ours(name, train, test, not options.warm, options.budget)
            options.out.parent.mkdir(exist_ok=True)
            options.out.write_text(json.dumps(found))
            print(f"{name} {number}: {np.mean(fold['ours']['density']):.3f} nats per row, {fold['ours']['processor']:.0f} s", flush=True)
    print(summary(found))
    (options.out.with_suffix(".md")).write_text(summary(found) + "\n")


if __name__ == "__main__":
    main()
