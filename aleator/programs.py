"""NumPyro programs as models (E14): program(x, y=None) with sample sites, one of them observed.

Latent sites become unconstrained parameters; the observed site's distribution is the output f(x), so every prediction, score and
decision works on programs as on networks.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree
from aleator._errors import DataError, ModelError, message
from aleator._typing import Array, Key, Tree
from aleator.data import Batch
from aleator.likelihoods import Likelihood


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramLikelihood(Likelihood):
    """p(y | f) where f already is the observed site's NumPyro distribution (a pytree)."""

    support_kind: str = "real"

    @property
    def support(self) -> str:  # type: ignore[override]
        return self.support_kind

    def encode(self, y: Any, fitting: bool = True) -> np.ndarray:
        """Regression and counts as (N, k); labels stay as they are. Finite, numeric."""
        y = np.asarray(y)
        if y.dtype.kind not in "fiub" or not np.all(np.isfinite(y)):
            raise DataError(
                message(
                    "y cannot be observed by the program.",
                    f"dtype {y.dtype}",
                    "finite numbers",
                    "encode labels as integers and drop missing rows",
                )
            )
        return y.astype(np.int32) if self.support_kind == "label" else (y[:, None] if y.ndim == 1 else y)

    def log_terms(self, outputs: Any, y: Array, extra: dict) -> Array:
        return _columns(outputs.log_prob(_match(y, outputs)))

    def mean(self, outputs: Any, extra: dict) -> Array:
        return outputs.probs if self.support_kind == "label" else _asked(outputs, "mean", lambda: outputs.mean)

    def variance(self, outputs: Any, extra: dict) -> Array:
        return (
            outputs.probs * (1 - outputs.probs) if self.support_kind == "label" else _asked(outputs, "variance", lambda: outputs.variance)
        )

    def entropy(self, outputs: Any, extra: dict) -> Array:
        if self.support_kind == "label":
            return -jnp.sum(jax.scipy.special.xlogy(outputs.probs, outputs.probs), axis=-1)
        return _asked(outputs, "entropy", outputs.entropy)

    def sample(self, key: Key, outputs: Any, extra: dict) -> Array:
        drawn = outputs.sample(key)
        return drawn if self.support_kind == "label" else _columns(drawn)

    def cdf(self, outputs: Any, y: Array, extra: dict) -> Array:
        return _asked(outputs, "cdf", lambda: outputs.cdf(_match(y, outputs)))


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramModel:
    """A NumPyro program over data. rows and support are filled in when it meets data."""

    program: Callable
    likelihood: Any = None
    observed: str = ""
    shapes: Any = None
    x_example: Any = None
    minibatch: bool = True
    stochastic: bool = False
    num_targets: int | None = None
    double = True  # chains run in float64

    def bind(self, x: Tree, y: Tree) -> ProgramModel:
        """Run the program once, find its latent and observed sites, and learn whether its likelihood splits over rows."""
        if y is None:
            raise DataError(message("A program needs something to observe.", "y=None", "y of shape (N,) or (N, k)", "pass (x, y)"))
        trace = self._trace(x, y, None)
        latent = {name: site for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]}
        observed = {name: site for name, site in trace.items() if site["type"] == "sample" and site["is_observed"]}
        if len(observed) != 1 or not latent:
            raise ModelError(
                message(
                    "The program cannot be used as a model.",
                    f"{len(observed)} observed and {len(latent)} latent sites",
                    "one observed and some latent sites",
                    "write program(x, y=None) with one obs=y",
                )
            )
        discrete = [name for name, site in latent.items() if site["fn"].support.is_discrete]
        if discrete:
            raise ModelError(
                message(
                    "The program has discrete latent sites.",
                    discrete,
                    "continuous latents",
                    "sum them out by hand (numpyro.distributions.Mixture…)",
                )
            )
        learned = [name for name, site in trace.items() if site["type"] == "param"]
        if learned:  # nothing here would move them
            raise ModelError(
                message("The program has numpyro.param sites.", learned, "sample sites", "give each a prior: numpyro.sample(name, …)")
            )
        scaled = [name for name, site in (latent | observed).items() if not np.allclose(_scale(trace, site), 1.0)]
        if scaled:
            raise ModelError(
                message(
                    "The program scales log densities, which the target alone may do.",
                    f"numpyro.handlers.scale around {scaled}",
                    "sites without it",
                    "weigh rows by al.fit(key, model, (x, y, weight), …), all of the posterior by temperature=…",
                )
            )
        name, site = next(iter(observed.items()))
        n = _tree.rows(y)
        if site["fn"].batch_shape[:1] != (n,):
            raise ModelError(
                message(
                    f"Site {name!r} is not one term per row.",
                    f"batch shape {site['fn'].batch_shape}",
                    f"leading axis {n}",
                    "observe y inside numpyro.plate('data', n)",
                )
            )
        one_row = jax.tree.map(lambda leaf: jnp.asarray(leaf[:1]), x)
        alone = self._trace(one_row, None, None)
        # Latents that keep their shape when the program sees one row are global; otherwise every step needs all rows.
        minibatch = all(name in alone and alone[name]["value"].shape == latent[name]["value"].shape for name in latent)
        shapes = tuple(sorted((key, _unconstrained_shape(s)) for key, s in latent.items()))
        kind = _support_kind(site["fn"])
        example = one_row if minibatch else jax.tree.map(jnp.asarray, x)
        columns = int(np.shape(y)[1]) if np.ndim(y) == 2 else 1
        return dataclasses.replace(
            self,
            likelihood=ProgramLikelihood(kind),
            observed=name,
            shapes=shapes,
            x_example=example,
            minibatch=minibatch,
            num_targets=columns,
        )

    def init(self, key: Key) -> Tree:
        """Uniform(−2, 2) on the unconstrained scale, the start NumPyro itself uses."""
        names = [name for name, _ in self._bound()]
        keys = jax.random.split(key, len(names))
        return {name: jax.random.uniform(k, shape, minval=-2.0, maxval=2.0) for (name, shape), k in zip(self._bound(), keys, strict=True)}

    def start(self, key: Key) -> Tree:
        return jax.tree.map(lambda leaf: 0.1 * leaf, self.init(key))

    def sample_prior(self, key: Key) -> Tree:
        try:
            trace = self._trace(self.x_example, None, None, seed=key)
        except NotImplementedError as error:
            raise ModelError(
                message(
                    "The prior of this program cannot be drawn from.",
                    "a site without sample(), such as ImproperUniform",
                    "proper priors",
                    "give every latent site a proper prior, or use a method that starts elsewhere, such as al.NUTS()",
                )
            ) from error
        return {name: _transform(trace[name]).inv(trace[name]["value"]) for name, _ in self._bound()}

    def constrain(self, params: Tree) -> Tree:
        """Latent values on their own scale."""
        trace = self._trace(self.x_example, None, params)
        return {name: trace[name]["value"] for name, _ in self._bound()}

    def log_prior(self, params: Tree) -> Array:
        """Σ log p(latent) + log |Jacobian| over unconstrained params."""
        trace = self._trace(self.x_example, None, params)
        total = jnp.zeros(())
        for name, _ in self._bound():
            site = trace[name]
            transform = _transform(site)
            jacobian = transform.log_abs_det_jacobian(params[name], site["value"])
            total = total + jnp.sum(site["fn"].log_prob(site["value"])) + jnp.sum(jacobian)
        return total

    def log_likelihood(self, params: Tree, batch: Batch, key: Key | None = None, apply: Any = None) -> Array:
        return self.likelihood.log_prob(self.outputs(params, batch.x), batch.y, {})

    def outputs(self, params: Tree, x: Tree, key: Key | None = None, apply: Any = None) -> Any:
        """The observed site's distribution at x, batch shape (n, …)."""
        from numpyro.distributions import Independent

        site = self._trace(x, None, params)[self.observed]["fn"]
        if isinstance(site, Independent) and len(site.batch_shape) == site.reinterpreted_batch_ndims == 1:
            site = site.base_dist  # columns independent given f: terms, intervals and entropies of each, as if to_event had not joined them
        return _broadcast(site)

    def extra(self, params: Tree) -> dict:
        return {}

    def _bound(self) -> tuple:
        if self.shapes is None:
            raise ModelError(message("The program has not met data yet.", "no shapes", "data", "call al.fit, or model.bind(x, y)"))
        return self.shapes

    def _trace(self, x: Tree, y: Tree, params: Tree | None, seed: Key | None = None) -> dict:
        numpyro = _numpyro()
        program = numpyro.handlers.seed(self.program, jax.random.key(0) if seed is None else seed)
        if params is not None:
            program = numpyro.handlers.substitute(program, substitute_fn=lambda site: _constrained(site, params))
        elif seed is None:  # any values will do: improper sites have no draws of their own
            program = numpyro.handlers.substitute(program, substitute_fn=numpyro.infer.init_to_uniform)
        traced = numpyro.handlers.trace(program)
        return traced.get_trace(x) if y is None else traced.get_trace(x, y)


def from_numpyro(program: Callable) -> ProgramModel:
    """A model from a NumPyro program program(x, y=None) with one observed site, one row per plate element.

    >>> import numpyro, numpyro.distributions as dist
    >>> def coin(x, y=None):
    ...     p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    ...     with numpyro.plate("flips", x.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(p), obs=y)
    >>> from_numpyro(coin).minibatch
    True
    """
    if not callable(program):
        raise ModelError(
            message("This is not a program.", type(program).__name__, "a function program(x, y=None)", "pass the function itself")
        )
    return ProgramModel(program)


def _numpyro() -> Any:
    import numpyro
    import numpyro.distributions
    import numpyro.infer

    return numpyro


def _transform(site: dict) -> Any:
    from numpyro.distributions.transforms import biject_to

    return biject_to(site["fn"].support)


def _unconstrained_shape(site: dict) -> tuple[int, ...]:
    value = jax.ShapeDtypeStruct(site["value"].shape, site["value"].dtype)
    return jax.eval_shape(_transform(site).inv, value).shape


def _support_kind(distribution: Any) -> str:
    """ "label", "count" or "real", as `Predictive` distinguishes them."""
    if "Categorical" in type(distribution).__name__:
        return "label"
    return "count" if distribution.support.is_discrete else "real"


def _scale(trace: dict, site: dict) -> Any:
    """What multiplies the site's log density besides the N/n of its plates, which is the target's to know."""
    scale = 1.0 if site["scale"] is None else site["scale"]
    for frame in site["cond_indep_stack"]:
        size, part = trace[frame.name]["args"]
        scale = scale if part is None else scale * part / size
    return scale


def _broadcast(distribution: Any, shape: tuple[int, ...] | None = None) -> Any:
    """The site with every parameter really of the plate's shape, so that rows can be told apart.

    NumPyro keeps a shared scale as a scalar or with an axis of length one, and a plate around a scalar site as a lazy expansion.
    """
    from numpyro import distributions as dist

    shape = distribution.batch_shape if shape is None else shape
    if isinstance(distribution, dist.ExpandedDistribution):
        return _broadcast(distribution.base_dist, shape)
    if isinstance(distribution, dist.Independent):
        inner, count = distribution.base_dist, distribution.reinterpreted_batch_ndims
        return _broadcast(inner, shape + inner.batch_shape[len(inner.batch_shape) - count :]).to_event(count)
    if isinstance(distribution, dist.MixtureSameFamily):
        mixing, parts = distribution.mixing_distribution, distribution.component_distribution
        return dist.MixtureSameFamily(_broadcast(mixing, shape), _broadcast(parts, (*shape, distribution.mixture_size)))
    values = distribution.get_args()
    own = {
        name: jnp.shape(value)[jnp.ndim(value) - getattr(distribution.arg_constraints.get(name), "event_dim", 0) :]
        for name, value in values.items()
    }
    full = {name: jnp.broadcast_to(value, shape + own[name]) for name, value in values.items()}
    if values and isinstance(getattr(distribution, "base_dist", None), dist.Distribution) and "base_dist" not in values:
        made_of = inspect.signature(type(distribution)).parameters
        full |= {"base_dist": _broadcast(distribution.base_dist, shape)} if "base_dist" in made_of else {}  # truncated
    return type(distribution)(**full) if values else distribution


def _constrained(site: dict, params: Tree) -> Any:
    return _transform(site)(params[site["name"]]) if site["type"] == "sample" and site["name"] in params else None


def _asked(distribution: Any, name: str, ask: Callable[[], Array]) -> Array:
    """A statistic of the site, (n, k); not every distribution has it."""
    try:
        return _columns(ask())
    except NotImplementedError as error:
        raise ModelError(
            message(
                f"The {name} of this site has no closed form.",
                type(distribution).__name__,
                f"a distribution with a {name}",
                "observe one that has it, such as LogNormal for the exponential of a Normal",
            )
        ) from error


def _columns(values: Array) -> Array:
    """(n,) → (n, 1); (n, k) stays."""
    return values[..., None] if values.ndim == 1 else values


def _match(y: Array, distribution: Any) -> Array:
    """y in the shape of the site: (n, 1) → (n,) where the site is one number per row."""
    shape = distribution.batch_shape + distribution.event_shape
    if y.shape == shape:
        return y
    if y.shape == (*shape, 1):
        return y[..., 0]
    raise ModelError(
        message("y does not fit the observed site.", f"y {y.shape}", f"{shape}", "give the site one element per row and target column")
    )
