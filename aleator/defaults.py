"""Default models and hyper-parameters for a table: what the command line and the estimators start from.

Everything here works on standardised columns, so that one set of defaults serves all tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import aleator as al
from aleator import _settings
from aleator._errors import MethodError, message

EARLY_ROWS = 50  # from this many rows on, networks stop early on a tenth of theirs
FULL_BATCH = 1000  # up to this many rows every step sees all of them
BATCH = 256
CLIP = 1.0  # without it, one in ten networks that learn their noise runs away at the start and takes its errors for noise
LINEAR_SCALES = (0.1, 1.0, 10.0, 100.0)  # prior scales of a linear model, in units of the noise: the evidence chooses
PROCESS_ROWS = 600  # up to this many rows `compare` tries Gaussian processes unasked: a step costs their cube
NETWORK_SCALE = 1.0  # prior scale of a network's weights times √fan-in: functions about as large as standardised targets
CLASS_SCALE = 4.0  # the same for classes: at 1 the most probable network of 64-50-10 on digits hardly learns (benchmarks/defaults.py)
CLASS_LAPLACE_SCALE = 2.0  # a wider prior lets a Laplace approximation of classes spread beyond where it holds
FLAT_SCALE = 1.0  # of a linear model
RIDGE = 0.2  # "ridge": the linear model under a prior this much narrower
WIDE_SCALE = 4.0  # "wide": the ensemble under a prior this much wider, which hardly pulls: early stopping does
PROCESSES = {"gp": lambda: al.gp.RBF(), "gp_rough": lambda: al.gp.Matern32()}
SPECIAL = ("linear", "logistic", "ridge", *PROCESSES, "wide")  # candidates beside the methods by name
AUTO_CLASSES = ("logistic", "ridge", "ensemble", "wide", "linear")
AUTO_NUMBERS = ("linear", "ridge", "ensemble", "laplace")
COMPARED = ("gp", "gp_rough", "laplace", "map", "dropout", "swag", "variational", "nuts")  # tried by `aleator compare` as well


def defaults(num_rows: int, early: bool = True) -> dict[type, dict[str, Any]]:
    """Hyper-parameters of the method classes for a table of this size: 50 passes, within 2000 … 20000 steps; early: stopped by held-out rows."""
    batch = None if num_rows <= FULL_BATCH else BATCH
    steps = 2000 if batch is None else int(np.clip(50 * num_rows // batch, 2000, 20_000))
    holdout = 0.1 if early and num_rows >= EARLY_ROWS else 0.0
    return {al.MAP: {"num_steps": steps, "batch_size": batch, "holdout": holdout, "check_every": 20, "patience": 10, "clip": CLIP}}


def quick(num_rows: int) -> dict[type, dict[str, Any]]:
    """Hyper-parameters of dearer methods where many are compared: runs of seconds to a minute."""
    batch = None if num_rows <= FULL_BATCH else BATCH
    steps = defaults(num_rows)[al.MAP]["num_steps"]
    return {
        al.Dropout: {"num_steps": steps, "batch_size": batch, "clip": CLIP},
        al.SWAG: {"num_steps": steps, "num_warmup": steps, "batch_size": batch or max(2, num_rows // 10)},
        al.Variational: {"num_steps": 2 * steps, "batch_size": batch},
        al.NUTS: {"num_samples": 200, "num_warmup": 300, "num_chains": 2, "max_depth": 7},
    }


def method(name: str, settings: Sequence[str], num_rows: int) -> al.Method:
    """The method as asked for on the command line, with defaults for this many rows."""
    # Laplace measures the curvature over the rows that its mode was found on: none are held out.
    return _settings.build(name, settings, defaults(num_rows, early=_settings.find(name) is not al.Laplace))


def models(chosen: al.Method, task: str, in_size: int, num_classes: int, hidden: Sequence[int], prior_scale: float | None) -> list[Any]:
    """The model for a task, or several to choose from by evidence."""
    if isinstance(chosen, al.Exact):
        if task == "classification":
            do = "use --method ensemble or --method map; or --task regression, if the labels are numbers"
            raise MethodError(message("Exact has no closed form for classes.", "a classification task", "a regression target", do))
        scales = LINEAR_SCALES if prior_scale is None else (prior_scale,)
        # The rate is small against 1, the variance of a standardised target: clean data must not look noisy.
        noise = al.Gaussian(al.InverseGamma(1.0, 1e-5))
        return [al.LinearModel(al.features.Identity(), noise, al.Normal(scale), scaled_by_noise=True) for scale in scales]
    if task == "classification":
        likelihood: Any = al.Categorical(num_classes)
    else:
        # Members of a deep ensemble learn how noisy each row is; a single network would explain its own errors away as noise.
        likelihood = al.HeteroscedasticGaussian() if isinstance(chosen, al.Ensemble) else al.Gaussian()
    network = al.networks.MLP(in_size, tuple(hidden), likelihood.num_outputs(1))
    if prior_scale is None:
        of_classes = CLASS_LAPLACE_SCALE if isinstance(chosen, al.Laplace) else CLASS_SCALE
        prior_scale = of_classes if task == "classification" else NETWORK_SCALE
    prior = al.Normal(prior_scale, scaling="fan_in")
    return [al.BNN(network, likelihood, prior)]


def auto_methods(task: str, x: np.ndarray, num_classes: int, hidden: Sequence[int], prior_scale: float | None) -> dict[str, Any]:
    """What `--method auto` tries, from cheap to dear, each with its own model: linear ones, networks. Processes take too long to compile for it."""
    return compared(task, x, num_classes, hidden, prior_scale, AUTO_CLASSES if task == "classification" else AUTO_NUMBERS)


def compared(
    task: str, x: np.ndarray, num_classes: int, hidden: Sequence[int], prior_scale: float | None, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Methods by name, each as (model, Method); by default all that suit a table of this kind, from cheap to dear."""
    classes, few = task == "classification", len(x) <= PROCESS_ROWS
    if names is None:
        names = [*(AUTO_CLASSES if classes else AUTO_NUMBERS), *COMPARED]
        names = [name for name in names if few or name not in PROCESSES]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        if name in PROCESSES and classes:
            continue
        found[name] = candidate(name, task, x.shape, num_classes, hidden, prior_scale)
    if not found:
        got, do = ", ".join(names), "name others, such as linear,ensemble"
        raise MethodError(message("None of these methods suits the table.", got, "Gaussian processes need numbers and few rows", do))
    return found


def candidate(
    name: str, task: str, shape: tuple[int, ...], num_classes: int, hidden: Sequence[int], prior_scale: float | None
) -> tuple[Any, al.Method]:
    """(model, Method) of one name: of `aleator methods`, or one of SPECIAL."""
    rows, columns = shape
    if name in PROCESSES:
        return al.gp.GP(PROCESSES[name]()), al.gp.Evidence(num_restarts=2, num_steps=150, tolerance=1e-2)
    if name in ("linear", "logistic", "ridge"):
        narrow = RIDGE if name == "ridge" else 1.0
        scale = narrow * (FLAT_SCALE if prior_scale is None else prior_scale)
        if task != "classification":
            return models(al.Exact(), task, columns, 0, (), scale)[0], al.Exact()
        flat = al.BNN(al.networks.MLP(columns, (), num_classes), al.Categorical(num_classes), al.Normal(scale))
        return flat, method("laplace", (), rows) if name == "linear" else method("map", ("holdout=0",), rows)
    if name == "wide":
        chosen = method("ensemble", (), rows)
        usual = CLASS_SCALE if task == "classification" else NETWORK_SCALE
        return models(chosen, task, columns, num_classes, hidden, WIDE_SCALE * (usual if prior_scale is None else prior_scale))[0], chosen
    chosen = _settings.build(name, (), defaults(rows, early=name != "laplace") | quick(rows))
    found = models(chosen, task, columns, num_classes, hidden, prior_scale)
    return found[1 if len(found) > 1 else 0], chosen


def check_names(names: Sequence[str]) -> list[str]:
    """Names that `candidate` knows, in lower case, each once; anything else is refused."""
    if not names:
        raise MethodError(message("There is nothing to compare.", "no names", "such as linear,ensemble", "name some methods"))
    for name in names:
        if name.lower() not in SPECIAL:
            _settings.find(name, SPECIAL)
    return list(dict.fromkeys(name.lower() for name in names))
