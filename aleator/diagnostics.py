"""Health: what a fit says about itself, and why a start does not work."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._chunks import compiled_position
from aleator._errors import message
from aleator._typing import Key, Tree
from aleator.data import Data

STILL_RISING = 0.02  # share of the whole climb made in the last tenth of the steps that counts as unfinished
FEW = 20  # points of a trace with fewer of which nothing is said about its course


def verdict(method: Any, algorithm: Any, result: Any, num_data: int) -> tuple[str, bool, dict[str, Any]]:
    """A sentence on how the run went, with the next thing to do; whether it is healthy; and the numbers behind it, if there are any."""
    bad = _tree.first_nonfinite(compiled_position(algorithm, algorithm.members is not None)(result.state))
    if bad is not None:
        return f"Parameter {bad} is not finite: lower the learning rate or standardise the data.", False, {}
    if algorithm.verdict is None:
        return (*_general(algorithm, result, num_data), {})
    sentence, healthy, *numbers = algorithm.verdict(result)
    return sentence, healthy, numbers[0] if numbers else {}


def _general(algorithm: Any, result: Any, num_data: int) -> tuple[str, bool]:
    if num_data == 1:
        return "Only one row of data: the posterior is mostly the prior; add rows before trusting it.", False
    trace = result.traces.get("log_likelihood")
    if trace is None or algorithm.watch != "log_likelihood":
        return f"Complete: {result.steps} step{'s' * (result.steps != 1)}, all finite.", True
    if trace.shape[-1] >= FEW:
        moved = np.ptp(trace, axis=-1)
        if np.any(moved == 0.0):
            return (
                "The log-likelihood never changed: the parameters did not move; raise the learning rate or check that the outputs depend on them.",
                False,
            )
    if result.stopped_early:
        return f"Converged: stopped early by the held-out data after {result.steps} steps, all finite.", True
    return levelled("log-likelihood", trace, result.steps, "Converged"), True


def levelled(what: str, trace: np.ndarray, num_steps: int, word: str = "Complete") -> str:
    """Whether what was climbed has levelled off, in words, as far as the trace can tell."""
    if trace.shape[-1] < FEW:
        return f"Complete: {num_steps} step{'s' * (num_steps != 1)}, all finite, too few to tell whether the {what} has levelled off."
    if still_rising(trace):
        return f"Still improving after {num_steps} steps: raise num_steps or learning_rate."
    return f"{word}: the {what} has levelled off after {num_steps} steps, all finite."


def still_rising(trace: np.ndarray) -> bool:
    """Whether the last tenth of the steps made a notable share of the climb, beyond the noise of the mini-batches."""
    trace = trace.reshape(-1, trace.shape[-1]).mean(axis=0)
    tenth = max(2, len(trace) // 10)
    first, before, last = trace[:tenth], trace[-2 * tenth : -tenth], trace[-tenth:]
    rise, noise = last.mean() - before.mean(), np.hypot(last.std(), before.std()) / np.sqrt(tenth)
    return bool(rise > STILL_RISING * max(last.mean() - first[0], 1e-12) and rise > 3 * noise)


def pareto_k(log_ratios: np.ndarray) -> float:
    """Shape k̂ of a generalised Pareto tail fitted to importance ratios (Vehtari et al. 2024; fit by Zhang and Stephens 2009).

    Ratios with k < ½ have a finite variance, with k < 1 a finite mean. log_ratios (S,); the largest min(S/5, 3√S) make the tail, at least
    5 of them. Equal ratios have no tail: −∞.
    """
    log_ratios = np.sort(np.asarray(log_ratios, np.float64) - np.max(log_ratios))
    size = len(log_ratios)
    number = int(np.ceil(min(0.2 * size, 3 * np.sqrt(size))))
    if number < 5:
        return float("nan")
    cut = log_ratios[-number - 1]
    excess = np.exp(log_ratios[-number:]) - np.exp(cut)
    if not excess[-1] > 1e-12 or excess[0] <= 0:
        return -np.inf if not excess[-1] > 1e-12 else _pareto_shape(excess[excess > 0])
    return _pareto_shape(excess)


def _pareto_shape(excess: np.ndarray) -> float:
    """Posterior mean of k under the profile likelihood of θ = −k/σ, shrunk to ½ by ten observations' worth."""
    number = len(excess)
    if number < 2:
        return float("nan")
    grid = 30 + int(np.sqrt(number))
    theta = 1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    theta = theta / (3.0 * excess[int(number / 4 + 0.5) - 1]) + 1 / excess[-1]
    shape = np.mean(np.log1p(-theta[:, None] * excess), axis=1)
    profile = number * (np.log(-theta / shape) - shape - 1)
    weight = 1 / np.sum(np.exp(np.clip(profile - profile[:, None], -700, 700)), axis=1)
    best = np.sum(theta * weight) / np.sum(weight)
    k = np.mean(np.log1p(-best * excess))
    return float((number * k + 10 * 0.5) / (number + 10))


def explain_start(target: Any, params: Tree, data: Any) -> str:
    """Name what makes the log joint non-finite at the start: a parameter, the prior, or the likelihood of a row."""
    path = _tree.first_nonfinite(params)
    if path is not None:
        return message(
            "The log joint is not finite at the start.",
            f"parameter {path} itself is not finite",
            "finite starting values",
            "check the init you passed",
        )
    batch = data.batch() if isinstance(data, Data) else None
    where = lambda function: _worst_leaf(jax.jit(jax.grad(function))(params), params)
    if target.model is not None:
        prior = float(jax.jit(target.log_prior)(params))
        if not np.isfinite(prior):
            got = f"log prior {prior} (parameter {where(target.log_prior)})"
            return message("The log joint is not finite at the start.", got, "a finite log prior", "start inside the prior's support")
        if batch is not None:
            likelihood = lambda p: target.log_likelihood(p, batch, jax.random.key(0) if target.stochastic else None)
            terms, worst = np.asarray(jax.jit(likelihood)(params)), where(lambda p: jnp.sum(likelihood(p)))
            rows = np.flatnonzero(~np.isfinite(terms))
            got = (
                f"log-likelihood {terms[rows[0]]} at row {rows[0]} ({len(rows)} rows in all; parameter {worst})"
                if rows.size
                else f"parameter {worst}"
            )
            return message(
                "The log joint is not finite at the start.", got, "finite values", "standardise x and y, or pass init= with smaller weights"
            )
    worst = where(lambda p: target.log_joint(p, batch))
    return message(
        "The log joint is not finite at the start.",
        f"parameter {worst}",
        "a finite log density and gradient",
        "pass another params0 or init",
    )


def _worst_leaf(gradient: Tree, params: Tree) -> str:
    """The leaves whose gradients are not finite (three at most), else the one with the largest entry."""
    names = _tree.paths(params)
    bad = [name for name, leaf in zip(names, jax.tree.leaves(gradient), strict=True) if not np.all(np.isfinite(leaf))]
    sizes = [float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(params)]
    return ", ".join(sorted(bad, key=lambda name: not name.startswith("network"))[:3]) or names[int(np.argmax(sizes))]


def to_arviz(posterior: Any, key: Key, num_samples: int) -> Any:
    """Posterior draws as an ArviZ object (0.x or 1.x), one variable per parameter leaf: Markov chains as they are, else one chain of
    num_samples draws."""
    import arviz

    chains = getattr(posterior, "num_chains", 1)
    draws = posterior.params if chains > 1 else posterior.sample(key, num_samples)
    split = lambda leaf: np.asarray(leaf).reshape(chains, -1, *np.shape(leaf)[1:])
    named = {path: split(leaf) for path, leaf in zip(_tree.paths(draws), jax.tree.leaves(draws), strict=True)}
    if int(arviz.__version__.split(".")[0]) >= 1:
        return arviz.from_dict({"posterior": named})
    return arviz.from_dict(posterior=named)
