"""How predictions and evidence change when the prior is made narrower or wider."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _functions, _tree, convergence
from aleator._cache import cached
from aleator._errors import DataError, HealthWarning, MethodError, ModelError, message
from aleator._fit import Fit
from aleator._fit import fit as fit_model
from aleator._random import as_key, split
from aleator._typing import Array, Key, KeyLike, Tree
from aleator.elicit._dials import log_density, scaled
from aleator.evidence._problem import check_whole
from aleator.evidence.predictive import MIN_DRAWS, PARETO
from aleator.explain._shared import stderr, table
from aleator.explain.effects import _units
from aleator.model import Supervised
from aleator.posterior import Draws, Linearised, Point, at_once, row_bytes


class Slope(NamedTuple):
    """Derivatives with respect to log c at c = 1, c the factor on the prior scale: of the predictive mean and standard deviation (rows,) or
    (rows, k), and of the log evidence [nats], with Monte Carlo errors. Times 0.69 they are changes per doubling."""

    mean: np.ndarray
    mean_stderr: np.ndarray
    std: np.ndarray
    std_stderr: np.ndarray
    log_evidence: float
    log_evidence_stderr: float


@dataclasses.dataclass(frozen=True, eq=False)
class Sensitivity:
    """Predictions at the rows of x under priors with their scale times each of F factors. Print it for the table.

    mean, std and their errors, (F, rows) or (F, rows, k), in units of y; shift = mean − mean at factor 1, with its error. log_evidence (F,):
    log p(D | factor) − log p(D | 1) in nats, NaN where there is none; kind says where it comes from. pareto_k (F,): of the weights, where
    draws were reweighted; above 0.7 the line is not to be trusted. slope: the same for a small change, which needs no weights.
    """

    x: Tree
    factors: np.ndarray
    mean: np.ndarray
    mean_stderr: np.ndarray
    std: np.ndarray
    std_stderr: np.ndarray
    shift_stderr: np.ndarray
    log_evidence: np.ndarray
    log_evidence_stderr: np.ndarray
    kind: str
    pareto_k: np.ndarray | None = None
    slope: Slope | None = None

    @property
    def base(self) -> int:
        """Which of the factors is 1."""
        return int(np.argmin(np.abs(np.log(self.factors))))

    @property
    def shift(self) -> np.ndarray:
        return self.mean - self.mean[self.base]

    def __str__(self) -> str:
        head = ["prior scale", "log evidence [nats]", "largest shift of the mean [predictive sd]", "mean predictive sd [y]"]
        head += ["Pareto k̂"] if self.pareto_k is not None else []
        rows = []
        for i, factor in enumerate(self.factors):
            relative = np.abs(self.shift[i]) / self.std[self.base]
            worst = np.unravel_index(np.argmax(relative), relative.shape)
            moved = _with_error(relative[worst], self.shift_stderr[i][worst] / self.std[self.base][worst])
            # Errors of the rows go together, so that their mean is an upper bound on the error of the mean.
            spread = _with_error(self.std[i].mean(), self.std_stderr[i].mean())
            same = i == self.base
            evidence = "–" if np.isnan(self.log_evidence[i]) else _with_error(self.log_evidence[i], self.log_evidence_stderr[i], "+")
            row = [f"× {factor:g}", "0" if same and evidence != "–" else evidence, "0" if same else moved, spread]
            if self.pareto_k is not None:
                row.append("–" if same else f"{self.pareto_k[i]:.2f}" + (" !" if self.pareto_k[i] > PARETO else ""))
            rows.append(tuple(row))
        lines = [table(tuple(head), rows), f"evidence: {self.kind}"]
        if self.slope is not None:
            s, log2 = self.slope, float(np.log(2.0))
            relative = np.abs(s.mean) / self.std[self.base]
            worst = np.unravel_index(np.argmax(relative), relative.shape)
            error = s.mean_stderr[worst] / self.std[self.base][worst]
            lines.append(
                f"per doubling, at × 1: log evidence {_with_error(log2 * s.log_evidence, log2 * s.log_evidence_stderr, '+')} nats, "
                f"largest shift of the mean {_with_error(log2 * relative[worst], log2 * error)} sd"
            )
        return "\n".join(lines)


def sensitivity(
    key: KeyLike,
    fit: Fit,
    x: Any,
    data: Any = None,
    factors: Sequence[float] = (0.5, 1.0, 2.0),
    num_samples: int = 4000,
) -> Sensitivity:
    """Predictions at the rows of x, and the evidence, under priors with their scale times each factor (see `elicit.scaled`).

    Given the data of the fit, the model is fitted again with each prior by the fit's own method: exact where the method is. Without, the
    fit's posterior draws are reweighted by p_c(θ)/p₁(θ) (Pareto-smoothed), which costs nothing, gives the change of log evidence as
    log E[p_c/p₁ | D], and holds as long as the posteriors overlap: a k̂ above 0.7 is warned about. The derivative at factor 1 is a
    posterior covariance with ∂ log p_c(θ)/∂ log c and needs no weights. Errors are Monte Carlo errors given the fit; what an approximate
    posterior or an optimiser adds is not in them.

    >>> import aleator as al
    >>> x = np.linspace(-1, 1, 20)
    >>> model = al.LinearModel(al.features.Polynomial(3), al.Gaussian(0.3), al.Normal(1.0))
    >>> fit = al.fit(0, model, (x, np.sin(3 * x)), al.Exact())
    >>> sensitivity(1, fit, np.array([0.0, 1.5]), (x, np.sin(3 * x))).log_evidence.round(2).tolist()
    [-6.42, 0.0, 1.16]
    """
    check_whole(num_samples=num_samples)
    if not isinstance(fit.model, Supervised):
        got = "a bare log density" if fit.model is None else f"a {type(fit.model).__name__}"
        raise ModelError(
            message("There is no prior scale to change.", got, "al.BNN, al.LinearModel", "fit with priors of your own and compare")
        )
    given = np.asarray(factors, np.float64).ravel()
    if not len(given) or not np.all(np.isfinite(given) & (given > 0)):
        raise DataError(message("These factors cannot be used.", factors, "positive numbers", "pass e.g. (0.5, 1.0, 2.0)"))
    every = np.unique(np.append(given, 1.0))
    priors = [scaled(fit.model.prior, float(c)) for c in every]
    found = _refitted(key, fit, x, data, every, priors) if data is not None else _reweighted(key, fit, x, every, num_samples)
    if found.pareto_k is not None and np.any(found.pareto_k > PARETO):
        bad = ", ".join(f"× {c:g} ({k:.2f})" for c, k in zip(every, found.pareto_k, strict=True) if k > PARETO)
        warnings.warn(
            f"Reweighting is not reliable for the prior scale {bad}: Pareto k̂ above {PARETO}, the posteriors hardly overlap. "
            "Pass the data to fit again, use factors closer to 1, or read the slope, which needs no weights.",
            HealthWarning,
            stacklevel=2,
        )
    return found


class _Moments(NamedTuple):
    """Predictive mean and standard deviation, (rows, k), their errors, and each draw's influence on the mean, (S, rows, k)."""

    mean: np.ndarray
    std: np.ndarray
    mean_stderr: np.ndarray
    std_stderr: np.ndarray
    influence: np.ndarray


def _reweighted(key: KeyLike, fit: Fit, x: Any, factors: np.ndarray, num_samples: int) -> Sensitivity:
    import arviz

    posterior = fit.posterior
    functions = None if isinstance(posterior, Point) or (isinstance(posterior, Linearised) and posterior.linear) else _functions.draw(
        as_key(key), fit, num_samples, ordered=True
    )  # fmt: skip
    if functions is None or not functions.drawn or functions.number < MIN_DRAWS:
        got = type(posterior).__name__ if functions is None or not functions.drawn else f"{functions.number} draws"
        raise MethodError(
            message("There are no draws to reweight.", got, f"a posterior over weights, {MIN_DRAWS} draws", "pass the data to fit again")
        )
    rows = fit._inputs(x)
    with jax.enable_x64(True):
        draws = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), functions.given)
        ratios, score = jax.tree.map(np.asarray, _ratios(fit.model)(draws, jnp.asarray(np.log(factors))))
        block = at_once(2 * _tree.rows(rows) * row_bytes(fit.model, rows), functions.number)
        mean, variance = jax.tree.map(np.asarray, _conditional(fit.model)(draws, jax.tree.map(jnp.asarray, rows), block))
    loc, scale = _units(fit)
    mean, variance = loc + scale * mean, scale**2 * variance
    chains, number = functions.num_chains, functions.number
    equal = np.full(number, 1.0 / number)
    base = int(np.argmin(np.abs(np.log(factors))))
    found: list[_Moments] = []
    ks, evidence, errors = [], [], []
    for ratio in ratios:
        if np.ptp(ratio) < 1e-12:  # the prior as it is
            weights, k = equal, -np.inf
        else:
            size = convergence.ess(np.exp(ratio - ratio.max()).reshape(chains, -1)) / number if isinstance(posterior, Draws) else 1.0
            relative = float(np.clip(1.0 if np.isnan(size) else size, 1e-3, 1.0))
            log_weights, k = arviz.psislw(ratio, reff=relative)
            weights = np.exp(np.asarray(log_weights))
        found.append(_moments(mean, variance, weights, chains))
        ks.append(float(k))
        plain = np.exp(ratio - ratio.max())
        evidence.append(float(np.log(plain.mean()) + ratio.max()))
        errors.append(float(stderr((plain / plain.mean())[:, None], chains)[0]))
    influence = found[base].influence
    shape = lambda values: _shaped(np.asarray(values), fit)
    return Sensitivity(
        rows,
        factors,
        shape([m.mean for m in found]),
        shape([m.mean_stderr for m in found]),
        shape([m.std for m in found]),
        shape([m.std_stderr for m in found]),
        shape([stderr(m.influence - influence, chains) for m in found]),
        np.array(evidence),
        np.array(errors),
        "reweighted draws",
        np.array(ks),
        _slope(mean, variance, score, found[base], chains, shape),
    )


def _slope(mean: np.ndarray, variance: np.ndarray, score: np.ndarray, base: _Moments, chains: int, shape: Callable) -> Slope:
    """d E[g]/d log c = Cov(g, ∂ log p_c/∂ log c): for E[y] with g = m, for Var[y] with g = v + (m − E[y])², for log p(D) the mean score."""
    centred = (score - score.mean())[:, None, None]
    of_mean = (mean - base.mean) * centred
    square = variance + (mean - base.mean) ** 2
    of_std = (square - square.mean(axis=0)) * centred / (2.0 * base.std)
    of_score = score[:, None]
    return Slope(
        shape(of_mean.mean(axis=0)[None])[0],
        shape(stderr(of_mean, chains)[None])[0],
        shape(of_std.mean(axis=0)[None])[0],
        shape(stderr(of_std, chains)[None])[0],
        float(score.mean()),
        float(stderr(of_score, chains)[0]),
    )


def _moments(mean: np.ndarray, variance: np.ndarray, weights: np.ndarray, chains: int) -> _Moments:
    """From E[y | θ] and Var[y | θ] of each draw (S, rows, k) and weights (S,) of sum one. Errors by the delta method: a weighted mean moves by
    the mean of w_s·S·(g_s − ĝ), whose own error knows the autocorrelation of the chains."""
    w = weights[:, None, None]
    centre = np.sum(w * mean, axis=0)
    square = variance + (mean - centre) ** 2
    total = np.sum(w * square, axis=0)
    share = w * len(weights)
    influence = share * (mean - centre)
    std = np.sqrt(total)
    return _Moments(centre, std, stderr(influence, chains), stderr(share * (square - total), chains) / (2.0 * std), influence)


def _refitted(key: KeyLike, fit: Fit, x: Any, data: Any, factors: np.ndarray, priors: list[Any]) -> Sensitivity:
    keys = split(as_key(key), 2 * len(factors))
    fits = [
        fit if factor == 1.0 else fit_model(k, dataclasses.replace(fit.model, prior=prior), data, fit.method)
        for k, factor, prior in zip(keys[: len(factors)], factors, priors, strict=True)
    ]
    fits = [dataclasses.replace(one, preprocessor=fit.preprocessor) for one in fits]
    found = [_predicted(k, one, x) for k, one in zip(keys[len(factors) :], fits, strict=True)]
    base = int(np.flatnonzero(factors == 1.0)[0])
    scores = [one.log_evidence for one in fits]
    missing = any(score is None for score in scores)
    values, errors = (np.array([np.nan if missing else getattr(score, name) for score in scores]) for name in ("value", "stderr"))
    shape = lambda values: _shaped(np.asarray(values), fit)
    means = [m.mean_stderr for m in found]
    others = np.arange(len(factors)) != base
    return Sensitivity(
        fit._inputs(x),
        factors,
        shape([m.mean for m in found]),
        shape(means),
        shape([m.std for m in found]),
        shape([m.std_stderr for m in found]),
        shape([np.hypot(error, means[base]) * other for error, other in zip(means, others, strict=True)]),
        values - values[base],
        np.hypot(errors, errors[base]) * others,
        "none" if missing else f"{scores[base].kind}, fitted again",  # type: ignore[union-attr]
    )


def _predicted(key: Key, fit: Fit, x: Any) -> _Moments:
    """Predictive moments of a fit with the error that its draws have; none where they are in closed form."""
    predictive = fit.predict(key, x)
    outputs = predictive.outputs
    wide = lambda values: np.asarray(values, np.float64).reshape(outputs.num_rows, -1)
    mean, std = wide(predictive.mean), wide(predictive.std)
    if outputs.gaussian or outputs.num_draws == 1:
        zero = np.zeros_like(mean)
        return _Moments(mean, std, zero, zero, zero[None])
    with jax.enable_x64(True):
        means, variances = jax.tree.map(np.asarray, _each(fit.model.likelihood)(outputs.draws, dict(outputs.extra)))
    loc, scale = _units(fit)
    weights = np.full(len(means), 1.0 / len(means)) if outputs.weights is None else np.asarray(outputs.weights, np.float64)
    chains = fit.posterior.num_chains if isinstance(fit.posterior, Draws) else 1
    return _moments(loc + scale * means, scale**2 * variances, weights, chains)


@cached
def _ratios(model: Any) -> Callable:
    """(draws, log factors (F,)) → log p_c(θ) − log p₁(θ), (F, S), and ∂ log p_c(θ)/∂ log c at 1, (S,)."""

    def one(params: Tree, logs: Array) -> tuple[Array, Array]:
        fans = model.fan_in(params["network"])
        at = lambda log_factor: log_density(model.prior, params["network"], params["prior"], fans, log_factor)
        zero = jnp.zeros((), logs.dtype)
        value, score = jax.value_and_grad(at)(zero)
        return jax.vmap(at)(logs) - value, score

    return jax.jit(lambda draws, logs: (lambda pair: (pair[0].T, pair[1]))(jax.lax.map(lambda p: one(p, logs), draws)))


@cached
def _conditional(model: Any) -> Callable:
    """(draws, x, block) → E[y | θ] and Var[y | θ], (S, rows, k)."""

    def one(params: Tree, x: Tree) -> tuple[Array, Array]:
        outputs, extra = model.outputs(params, x, None), model.extra(params)
        mean, variance = model.likelihood.mean(outputs, extra), model.likelihood.variance(outputs, extra)
        return mean, jnp.broadcast_to(variance, mean.shape)

    run = lambda draws, x, block: jax.lax.map(lambda p: one(p, x), draws, batch_size=block)
    return jax.jit(run, static_argnums=2)


@cached
def _each(likelihood: Any) -> Callable:
    def one(outputs: Array, extra: dict) -> tuple[Array, Array]:
        mean = likelihood.mean(outputs, extra)
        return mean, jnp.broadcast_to(likelihood.variance(outputs, extra), mean.shape)

    def every(draws: Array, extra: dict) -> tuple[Array, Array]:
        axes = {name: 0 if jnp.ndim(value) else None for name, value in extra.items()}
        return jax.vmap(one, in_axes=(0, axes))(draws, extra)

    return jax.jit(every)


def _shaped(values: np.ndarray, fit: Fit) -> np.ndarray:
    """(F, rows, 1) → (F, rows) when the user's y was (n,)."""
    label = fit.model.likelihood.support == "label"
    return values[..., 0] if fit.manifest["data"]["squeeze"] and not label and values.shape[-1] == 1 else values


def _with_error(value: float, error: float, sign: str = "") -> str:
    return f"{value:{sign}.3g}" + (f" ± {error:.1g}" if error > 0 else "")
