"""The road from a table to a Fit, shared by `fit` and `demo`: default models and hyper-parameters, splitting, fitting.

Everything here works on standardised columns, so that one set of defaults serves all tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import aleator as al
from aleator import _random
from aleator._errors import MethodError, message
from aleator.cli import _settings

HELD_OUT = 0.2  # share of rows kept for the printed score
FEW_ROWS = 20  # below this many rows nothing is held out for it
EARLY_ROWS = 50  # from this many rows on, networks stop early on a tenth of theirs
FULL_BATCH = 1000  # up to this many rows every step sees all of them
BATCH = 256
CLIP = 1.0  # without it, one in ten networks that learn their noise runs away at the start and takes its errors for noise
LINEAR_SCALES = (0.1, 1.0, 10.0, 100.0)  # prior scales of a linear model, in units of the noise: the evidence chooses
PROCESS_ROWS = 1500  # up to this many rows Gaussian processes are tried
NETWORK_SCALE = 1.0  # prior scale of a network's weights times √fan-in: functions about as large as standardised targets


def defaults(num_rows: int, early: bool = True) -> dict[type, dict[str, Any]]:
    """Hyper-parameters of the method classes for a table of this size: 50 passes, within 2000 … 20000 steps; early: stopped by held-out rows."""
    batch = None if num_rows <= FULL_BATCH else BATCH
    steps = 2000 if batch is None else int(np.clip(50 * num_rows // batch, 2000, 20_000))
    holdout = 0.1 if early and num_rows >= EARLY_ROWS else 0.0
    return {al.MAP: {"num_steps": steps, "batch_size": batch, "holdout": holdout, "check_every": 20, "patience": 10, "clip": CLIP}}


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
    prior = al.Normal(NETWORK_SCALE if prior_scale is None else prior_scale, scaling="fan_in")
    return [al.BNN(network, likelihood, prior)]


def auto_methods(task: str, x: np.ndarray, num_classes: int, hidden: Sequence[int], prior_scale: float | None) -> dict[str, Any]:
    """What `--method auto` tries, from cheap to dear, each with its own model: linear, processes (few rows), networks."""
    few = len(x) <= PROCESS_ROWS
    if task == "classification":
        flat = al.BNN(al.networks.MLP(x.shape[1], (), num_classes), al.Categorical(num_classes), al.Normal(1.0))
        found: dict[str, Any] = {"linear": (flat, method("laplace", (), len(x)))}
    else:
        linear = models(al.Exact(), task, x.shape[1], 0, (), prior_scale)
        found = {"linear": (linear[1 if len(linear) > 1 else 0], al.Exact())}
        if few:
            found |= {"gp": (al.gp.GP(al.gp.RBF()), al.Exact()), "gp_rough": (al.gp.GP(al.gp.Matern32()), al.Exact())}
    for name in ("laplace", "ensemble"):
        chosen = method(name, (), len(x))
        found[name] = (models(chosen, task, x.shape[1], num_classes, hidden, prior_scale)[0], chosen)
    return found


def fit(
    key: Any, candidates: Sequence[Any], x: np.ndarray, y: np.ndarray, chosen: al.Method, preprocessor: Any = None, **run: Any
) -> al.Fit:
    """Fit every candidate and keep the one with the highest evidence; the preprocessor travels with it."""
    if len(candidates) > 1:
        run = {name: value for name, value in run.items() if name not in ("checkpoint", "checkpoint_every", "resume")}
    keys_of_fits = [key] if len(candidates) == 1 else _random.split(_random.as_key(key), len(candidates))
    fits = [al.fit(key_fit, model, (x, y), chosen, **run) for key_fit, model in zip(keys_of_fits, candidates, strict=True)]
    best = fits[0] if len(fits) == 1 else max(fits, key=lambda one: one.log_evidence.value)  # type: ignore[union-attr]
    return dataclasses.replace(best, preprocessor=preprocessor)


def keys(seed: int) -> tuple[Any, Any, int]:
    """(key of the fit, key of predictions, host seed of the split): one seed, three independent uses."""
    key_fit, key_predict, key_split = _random.split(_random.as_key(seed), 3)
    return key_fit, key_predict, _random.seed_of(key_split)


def split(seed: int, num_rows: int, labels: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (train, held out). With labels each class gives its share, and keeps at least one row for training."""
    generator = np.random.Generator(np.random.Philox(seed))
    order = generator.permutation(num_rows)
    if labels is None:
        held = order[: round(HELD_OUT * num_rows)]
    else:
        groups = [order[labels[order] == label] for label in np.unique(labels)]
        held = np.concatenate([group[: min(round(HELD_OUT * len(group)), len(group) - 1)] for group in groups])
    train = np.setdiff1d(np.arange(num_rows), held)
    return train, np.sort(held)


def with_record(fit: al.Fit, record: dict[str, Any]) -> al.Fit:
    """The same fit with more in its manifest."""
    return dataclasses.replace(fit, manifest=fit.manifest | record)
