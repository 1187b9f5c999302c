"""Gaussian processes (A9, A10, E7): kernels, exact and sparse processes, wide networks' limits, deep processes."""

from aleator.gp import deep, iterative, random_features, series, sparse, svgp, weighted, wide
from aleator.gp.conditioned import Conditioned
from aleator.gp.deep import DSVI, DeepGP
from aleator.gp.evidence import Evidence
from aleator.gp.heads import RandomHead, sngp
from aleator.gp.iterative import Iterative
from aleator.gp.kernels import (
    RBF,
    Bias,
    Categorical,
    Changepoint,
    Custom,
    Deep,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Product,
    RationalQuadratic,
    SpectralMixture,
    Sum,
    matrix,
)
from aleator.gp.layered import Layered
from aleator.gp.means import Constant, Fixed, Mean, Projection, Zero
from aleator.gp.noises import KnownNoise, NoiseProcess, long_form
from aleator.gp.paths import paths
from aleator.gp.process import GP
from aleator.gp.questions import LeaveOneOut, Overfit, extend, leave_one_out, overfitting, prior_functions
from aleator.gp.random_features import RandomDeep, RandomFourier
from aleator.gp.series import SeriesGP, Smoothed
from aleator.gp.sparse import Inducing, SparseGP, greedy
from aleator.gp.svgp import SVGP

__all__ = [
    "Bias",
    "Categorical",
    "Changepoint",
    "Conditioned",
    "Constant",
    "Custom",
    "DSVI",
    "Deep",
    "DeepGP",
    "Evidence",
    "Fixed",
    "GP",
    "Inducing",
    "Iterative",
    "Kernel",
    "KnownNoise",
    "Layered",
    "LeaveOneOut",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Mean",
    "NoiseProcess",
    "Overfit",
    "Periodic",
    "Product",
    "Projection",
    "RBF",
    "RandomDeep",
    "RandomFourier",
    "RandomHead",
    "RationalQuadratic",
    "SVGP",
    "SeriesGP",
    "Smoothed",
    "SparseGP",
    "SpectralMixture",
    "Sum",
    "Zero",
    "deep",
    "extend",
    "greedy",
    "iterative",
    "leave_one_out",
    "long_form",
    "matrix",
    "overfitting",
    "paths",
    "prior_functions",
    "random_features",
    "series",
    "sngp",
    "sparse",
    "svgp",
    "weighted",
    "wide",
]
