"""Factor models: y's natural parameters are linear in a few hidden numbers. Probabilistic PCA, factor analysis, exponential-family PCA."""

from aleator.latent.factor.columns import Columns
from aleator.latent.factor.model import FactorModel

__all__ = ["Columns", "FactorModel"]
