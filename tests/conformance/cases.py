"""The table the conformance suite is generated from. A new method, likelihood, network or prior joins by one row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aleator as al

N, D = 40, 3


def regression(k: int | None = None, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """y of shape (N,) for k=None, (N, k) otherwise; float64 values that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, D)).astype(np.float32)
    w = rng.normal(size=(D, k or 1))
    y = (x @ w + 0.3 * rng.normal(size=(N, k or 1))).astype(np.float32)
    return x, y[:, 0] if k is None else y


def linear_model(noise: float = 0.3) -> al.LinearModel:
    return al.LinearModel(al.features.Identity(), al.Gaussian(noise), al.Normal(1.0))


def network_model() -> al.BNN:
    return al.BNN(al.networks.MLP(D, (8,), 1, activation="tanh"), al.Gaussian(), al.Normal(1.0))


def keep_likelihood(key: Any, params: Any, data: Any) -> Any:
    """A conditional that leaves its block where it is: invariant for every target."""
    return params["likelihood"]


# One row per method: small settings, and the reference models it can take.
STEPS = 60
METHODS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "exact": (al.Exact(), ("linear",)),
    "map": (al.MAP(num_steps=STEPS, batch_size=8), ("linear", "network")),
    "ensemble": (al.Ensemble(al.MAP(num_steps=STEPS, batch_size=8), 3), ("linear", "network")),
    "variational": (al.Variational(num_steps=STEPS, batch_size=8, num_evidence=8), ("linear", "network")),
    "ivon": (al.IVON(num_steps=STEPS, batch_size=8), ("linear", "network")),
    "dropout": (al.Dropout(0.2, placement="inputs", num_steps=STEPS, batch_size=8, num_evidence=4), ("linear", "network")),
    "concrete_dropout": (al.ConcreteDropout(num_steps=STEPS, batch_size=8, num_evidence=4), ("linear", "network")),
    "variational_dropout": (al.VariationalDropout(num_steps=STEPS, batch_size=8), ("linear", "network")),
    "sparse_dropout": (al.SparseDropout(num_steps=STEPS, batch_size=8), ("linear", "network")),
    "hmc": (al.HMC(num_samples=30, num_warmup=30, num_chains=2), ("linear", "network")),
    "nuts": (al.NUTS(num_samples=20, num_warmup=20, num_chains=2, max_depth=5), ("network",)),
    "random_walk": (al.RandomWalk(num_samples=40, num_warmup=40, num_chains=2), ("network",)),
    "independence": (al.Independence(num_samples=40, num_warmup=100, num_chains=2), ("linear",)),
    "slice": (al.Slice(num_samples=10, num_warmup=10, num_chains=2), ("linear",)),
    "elliptical_slice": (al.EllipticalSlice(num_samples=40, num_warmup=20, num_chains=2), ("network",)),
    "mala": (al.MALA(num_samples=40, num_warmup=40, num_chains=2), ("network",)),
    "gibbs": (al.Gibbs({"likelihood": keep_likelihood}, al.RandomWalk(), num_samples=40, num_warmup=40, num_chains=2), ("network",)),
    "parallel_tempering": (al.ParallelTempering(num_samples=20, num_warmup=20, num_chains=2), ("linear",)),
    "smc": (al.SMC(num_particles=32), ("linear",)),
    "sir": (al.SIR(num_samples=50), ("linear",)),
    "marginal_gibbs": (al.MarginalGibbs(num_samples=30, num_warmup=20, num_chains=2, tries=2), ("shallow",)),
    "reversible_jump": (al.ReversibleJump(num_samples=30, num_warmup=20, num_chains=2), ("linear",)),
    "chees": (al.ChEES(num_samples=10, num_warmup=20, num_chains=8), ("network",)),
    "laplace": (al.Laplace("kron", base=al.MAP(num_steps=STEPS, batch_size=8)), ("linear", "network")),
    "swag": (al.SWAG(num_steps=STEPS, num_warmup=30, batch_size=8, thin=3, rank=5), ("network",)),
    "snapshot": (al.Snapshot(num_steps=STEPS, num_cycles=3, batch_size=8), ("network",)),
    "bayesian_bootstrap": (al.BayesianBootstrap(al.MAP(num_steps=STEPS, batch_size=8), 3), ("network",)),
    "batch_ensemble": (al.BatchEnsemble(num_members=3, num_steps=STEPS, batch_size=8), ("network",)),
    "hyper_ensemble": (al.HyperEnsemble(al.MAP(num_steps=STEPS, batch_size=8, holdout=0.2, check_every=20), 4, 2), ("network",)),
    "expectation_propagation": (al.ExpectationPropagation(), ("linear",)),
    "pbp": (al.PBP(num_epochs=2), ("relu",)),
    "nested": (al.Nested(num_live=20, num_runs=2, num_moves=5), ("linear",)),
    "sgld": (al.SGLD(1e-3, 20, 20, 2, thin=2, batch_size=8, num_search=20), ("linear", "network")),
    "sghmc": (al.SGHMC(1e-3, 0.2, 20, 20, 2, thin=1, batch_size=8, num_search=20, cycles=2), ("network",)),
    "sgnht": (al.SGNHT(1e-3, 0.2, 1e-3, 20, 20, 2, thin=2, batch_size=8, num_search=0, preconditioner="rmsprop"), ("network",)),
    "underdamped": (al.Underdamped("auto", 0.2, 20, 20, 2, thin=2, batch_size=8, num_search=20, control_variates="svrg"), ("network",)),
    "svgd": (al.SVGD(4, num_steps=STEPS, batch_size=8), ("linear", "network")),
    "repulsive_ensemble": (al.RepulsiveEnsemble(4, num_steps=STEPS, batch_size=8), ("network",)),
    "refined": (al.Refined(num_refine=2, num_steps=STEPS, num_start=20, batch_size=8, num_samples=16), ("linear", "network")),
    "microcanonical": (al.Microcanonical(num_samples=30, num_warmup=30, num_chains=2), ("network",)),
}
MODELS = {
    "linear": linear_model,
    "network": network_model,
    "relu": lambda: al.BNN(al.networks.MLP(D, (8,), 1), al.Gaussian(), al.Normal(1.0)),
    "shallow": lambda: al.shallow.ShallowNet(3),
}
# Methods for models of y alone: no inputs, no predictions, the same promises otherwise (test_generative.py).
GENERATIVE: dict[str, tuple[Any, str]] = {
    "em": (al.EM(num_steps=30, num_restarts=2), "mixture"),
    "cavi": (al.CAVI(num_steps=30, num_restarts=2), "mixture"),
    "amortised": (al.Amortised(num_steps=STEPS, batch_size=8), "autoencoder"),
}
GENERATIVE_MODELS = {
    "mixture": lambda: al.latent.Mixture(2, al.latent.parts.Gaussian("diagonal")),
    "autoencoder": lambda: al.latent.VAE(2, (8,), (8,), al.Gaussian(0.5)),
}
METHOD_CASES = [(name, model) for name, (_, models) in METHODS.items() for model in models]

REFERENCE_METHODS = {"map": METHODS["map"][0], "ensemble": METHODS["ensemble"][0]}


def _labels(classes: int) -> np.ndarray:
    return np.arange(N) % classes


@dataclasses.dataclass(frozen=True)
class LikelihoodCase:
    likelihood: Any
    out_size: int
    y: Any


_x, _real = regression()
_counts = np.random.default_rng(1).poisson(2.0, N)
LIKELIHOODS = {
    "gaussian, learned": LikelihoodCase(al.Gaussian(), 1, _real),
    "gaussian, fixed": LikelihoodCase(al.Gaussian(0.5), 1, _real),
    "gaussian, two targets": LikelihoodCase(al.Gaussian(), 2, regression(2)[1]),
    "heteroscedastic": LikelihoodCase(al.HeteroscedasticGaussian(), 2, _real),
    "heteroscedastic, two targets": LikelihoodCase(al.HeteroscedasticGaussian(), 4, regression(2)[1]),
    "student t": LikelihoodCase(al.StudentT(), 1, _real),
    "bernoulli": LikelihoodCase(al.Bernoulli(), 1, _labels(2)),
    "categorical": LikelihoodCase(al.Categorical(4), 4, _labels(4)),
    "categorical, 20 classes": LikelihoodCase(al.Categorical(20), 20, _labels(20)),
    "poisson": LikelihoodCase(al.Poisson(), 1, _counts),
    "negative binomial": LikelihoodCase(al.NegativeBinomial(), 1, _counts),
}


def _equinox() -> Any:
    import equinox as eqx

    return eqx.nn.MLP(D, 1, 8, 1, key=jax.random.key(0))


def _nnx() -> Any:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first, self.second = nnx.Linear(D, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(jnp.tanh(self.first(x)))

    return Net(nnx.Rngs(0))


def _function() -> Any:
    params = {"w": jax.random.normal(jax.random.key(0), (D, 8)), "v": jax.random.normal(jax.random.key(1), (8, 1))}
    return lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], params


def _images(size: int, channels: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(N, size, size, channels)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class NetworkCase:
    """make: → the network; x: its inputs; its one output is fitted to the regression target, `classes` outputs to labels."""

    make: Any
    x: Any
    classes: int | None = None


NETWORKS = {
    "mlp": NetworkCase(lambda: al.networks.MLP(D, (8, 8), 1), _x),
    "shallow": NetworkCase(lambda: al.networks.Shallow(D, 5), _x),
    "partial": NetworkCase(lambda: al.networks.Partial(al.networks.MLP(D, (8,), 1), (0, 1)), _x),
    "equinox": NetworkCase(_equinox, _x),
    "nnx": NetworkCase(_nnx, _x),
    "function": NetworkCase(_function, _x),
    "lenet5": NetworkCase(lambda: al.networks.LeNet5(out_size=3), _images(28, 1), 3),
    "lenet5 caffe": NetworkCase(lambda: al.networks.LeNet5Caffe(out_size=3), _images(28, 1), 3),
    "vgg": NetworkCase(lambda: al.networks.VGG((8, 8, 3), 3, widths=((4,), (8,)), dense=(8,), norm="group"), _images(8, 3), 3),
    "resnet": NetworkCase(lambda: al.networks.ResNet((8, 8, 3), 3, depth=8, width=4, norm="frn"), _images(8, 3), 3),
    "gru": NetworkCase(lambda: al.networks.GRU(3, (4,), 3), _images(4, 3)[:, 0], 3),
    "lstm": NetworkCase(lambda: al.networks.LSTM(3, (4,), 3), _images(4, 3)[:, 0], 3),
    "transformer": NetworkCase(lambda: al.networks.Transformer(3, 4, 3, width=4, depth=1, heads=2), _images(4, 3)[:, 0], 3),
}

PRIORS = {
    "normal": al.Normal(1.0),
    "normal, per layer": al.Normal({"layer0": 1.0, "*": 0.5}),
    "normal, fan-in": al.Normal(1.0, scaling="fan_in"),
    "laplace": al.priors.Laplace(1.0),
    "student t": al.priors.StudentT(3.0),
    "scale mixture": al.priors.ScaleMixture(1.0, narrow=0.1),
    "hierarchical, layers": al.priors.Hierarchical(al.HalfCauchy(1.0)),
    "hierarchical, global": al.priors.Hierarchical(per="global", scaling="fan_in"),
    "hierarchical, centred": al.priors.Hierarchical(al.LogNormal(0.0, 0.3), per="leaf", centred=True),
    "hierarchical, inputs": al.priors.Hierarchical(al.HalfCauchy(1.0), per={"layer0.weight": "input", "*": "layer"}),
    "hierarchical, units": al.priors.Hierarchical(al.InverseGamma(2.0, 1.0), per="unit", centred="auto"),
    "horseshoe": al.priors.Horseshoe(al.HalfCauchy(0.3)),
    "horseshoe, inputs, slab": al.priors.Horseshoe(local="input", slab=al.InverseGamma(2.0, 8.0), scaling="fan_in"),
}
