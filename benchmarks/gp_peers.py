"""Steps of Gaussian processes beside GPyTorch's, interleaved in one run: exact (N=2,000), SVGP (N=10,000, M=128), a two-layer deep GP.

    python benchmarks/gp_peers.py [--repeats 7]

float64, one thread each (run it pinned to one core: `taskset -c 0`), the same sizes, batches and initial hyper-parameters; the median over interleaved repeats
of processor seconds of one training step: value, gradient and the optimiser's move. Needs torch and gpytorch, which Aleator itself does not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import gpytorch
import jax
import jax.numpy as jnp
import numpy as np
import torch

from aleator import gp
from aleator.data import Data
from aleator.target import Target

SIZE, BATCH, INDUCING, HIDDEN = 10_000, 256, 128, 2
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((SIZE, 8))
Y = np.sin(X[:, 0]) + 0.1 * RNG.standard_normal(SIZE)


def our_step(model: object, method: object, n: int) -> Callable[[], object]:
    """One compiled step of a method, state to state."""
    with jax.enable_x64(True):
        target = Target(model, SIZE)
        algorithm = method.build(target)
        state = algorithm.init(jax.random.key(0), model.start(jax.random.key(1)))
        batch = Data(X[:n], Y[:n, None], None).batch()
        step = jax.jit(algorithm.phases[0].step)
        keep = {"state": state, "key": jax.random.key(2)}

    def run() -> object:
        with jax.enable_x64(True):
            keep["key"], now = jax.random.split(keep["key"])
            keep["state"], info = step(now, keep["state"], batch)
            return jax.block_until_ready(info)

    return run


def torch_step(loss: Callable[[], torch.Tensor], parameters: list, optimizer: type = torch.optim.Adam) -> Callable[[], object]:
    moved = optimizer(parameters, lr=0.01)

    def run() -> object:
        moved.zero_grad()
        value = loss()
        value.backward()
        moved.step()
        return value

    return run


def exact(number: int = 2000) -> dict[str, Callable[[], object]]:
    with jax.enable_x64(True):
        model = gp.GP(gp.RBF(), gp.Zero()).bind(X[:number], Y[:number, None])
        params = model.start(jax.random.key(0))
        compute = jax.jit(jax.value_and_grad(model.log_evidence))
        on = jnp.asarray(X[:number]), jnp.asarray(Y[:number, None])
    x, y = torch.tensor(X[:number]), torch.tensor(Y[:number])

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, likelihood: object) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=8))

        def forward(self, at: torch.Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    theirs = Exact(likelihood)
    theirs.train()
    criterion = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, theirs)
    default = torch_step(lambda: -criterion(theirs(x), y), list(theirs.parameters()))

    def factorised() -> object:
        with gpytorch.settings.max_cholesky_size(10 * number):
            return default()

    def ours() -> object:
        with jax.enable_x64(True):
            return jax.block_until_ready(compute(params, *on))

    return {"ours": ours, "GPyTorch, Cholesky": factorised, "GPyTorch, default (CG)": default}


def sparse() -> dict[str, Callable[[], object]]:
    places = gp.greedy(gp.RBF().bind(X), X, INDUCING)
    model = gp.SparseGP(gp.RBF(), learn_inducing=True, inducing=places).bind(X, Y[:, None])
    x, y = torch.tensor(X[:BATCH]), torch.tensor(Y[:BATCH])

    class Sparse(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            variational = gpytorch.variational.CholeskyVariationalDistribution(INDUCING)
            super().__init__(gpytorch.variational.VariationalStrategy(self, torch.tensor(places), variational))
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=8))

        def forward(self, at: torch.Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))

    likelihood, theirs = gpytorch.likelihoods.GaussianLikelihood(), Sparse()
    criterion = gpytorch.mlls.VariationalELBO(likelihood, theirs, SIZE)
    both = [*theirs.parameters(), *likelihood.parameters()]
    return {
        "ours": our_step(model, gp.SVGP(num_steps=1000, batch_size=BATCH), BATCH),
        "GPyTorch": torch_step(lambda: -criterion(theirs(x), y), both),
    }


def deep() -> dict[str, Callable[[], object]]:
    from gpytorch.models.deep_gps import DeepGP, DeepGPLayer

    model = gp.DeepGP(gp.RBF(), (HIDDEN,), INDUCING).bind(X, Y[:, None])
    places = torch.tensor(np.asarray(model.layers[0].inducing))
    inner = torch.tensor(np.asarray(model.layers[1].inducing))

    class Layer(DeepGPLayer):
        def __init__(self, size: int, outputs: int | None, at: torch.Tensor) -> None:
            shape = torch.Size([]) if outputs is None else torch.Size([outputs])
            at = at if outputs is None else at.expand(outputs, *at.shape).clone()
            variational = gpytorch.variational.CholeskyVariationalDistribution(INDUCING, batch_shape=shape)
            super().__init__(gpytorch.variational.VariationalStrategy(self, at, variational, learn_inducing_locations=True), size, outputs)
            self.mean_module = gpytorch.means.ConstantMean() if outputs is None else gpytorch.means.LinearMean(size)
            self.covar_module = gpytorch.kernels.ScaleKernel(
                gpytorch.kernels.RBFKernel(batch_shape=shape, ard_num_dims=size), batch_shape=shape
            )

        def forward(self, at: torch.Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))

    class Two(DeepGP):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(8, HIDDEN, places), Layer(HIDDEN, None, inner)
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, at: torch.Tensor) -> object:
            return self.second(self.first(at))

    theirs = Two()
    criterion = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(theirs.likelihood, theirs, SIZE))
    x, y = torch.tensor(X[:BATCH]), torch.tensor(Y[:BATCH])

    def loss() -> torch.Tensor:
        with gpytorch.settings.num_likelihood_samples(1):
            return -criterion(theirs(x), y)

    return {
        "ours": our_step(model, gp.DSVI(num_steps=1000, batch_size=BATCH), BATCH),
        "GPyTorch": torch_step(loss, list(theirs.parameters())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    cases = {
        "exact, N=2000": (exact(), 1),
        f"SVGP, M={INDUCING}, batch {BATCH}": (sparse(), 10),
        f"deep GP, 2 layers, M={INDUCING}, batch {BATCH}": (deep(), 5),
    }
    for name, (steps, each) in cases.items():
        seconds: dict[str, list[float]] = {who: [] for who in steps}
        for step in steps.values():
            step(), step()  # the second may compile again, for what the first has made
        for _ in range(args.repeats):
            for who, step in steps.items():
                began = time.process_time()
                for _ in range(each):
                    step()
                seconds[who].append((time.process_time() - began) / each)
        middle = {who: float(np.median(values)) for who, values in seconds.items()}
        told = ", ".join(
            f"{who} {1e3 * value:.1f} ms" + (f" ({value / middle['ours']:.2f} ×)" if who != "ours" else "") for who, value in middle.items()
        )
        print(f"{name}: {told}", flush=True)


if __name__ == "__main__":
    main()
