"""Posteriors: few kinds for many methods. The one required skill is a distribution over the outputs f(x).

`outputs(key, model, x, num_samples)` → Outputs. Weight draws are made once and then applied to all rows, in pieces that fit a byte
budget: how rows are cut cannot change which functions were drawn.
"""

from aleator._outputs import Outputs as Outputs
from aleator.posterior._pieces import BYTE_BUDGET as BYTE_BUDGET
from aleator.posterior._pieces import at_once as at_once
from aleator.posterior._pieces import by_rows as by_rows
from aleator.posterior._pieces import check_joint, row_bytes
from aleator.posterior._posterior import Posterior, Score
from aleator.posterior._sampled import Sampled, sampled
from aleator.posterior.draws import Draws, Mixture, Point, mixture
from aleator.posterior.dropout import GaussianDropout, Masked, Passes
from aleator.posterior.exact import LinearGaussian
from aleator.posterior.gaussian import Gaussian, Transformed
from aleator.posterior.linearised import Linearised, Taylor
from aleator.posterior.rank_one import RankOne, effective

__all__ = [
    "Draws",
    "Gaussian",
    "GaussianDropout",
    "LinearGaussian",
    "Linearised",
    "Masked",
    "Mixture",
    "Passes",
    "Point",
    "Posterior",
    "RankOne",
    "Sampled",
    "Score",
    "Taylor",
    "Transformed",
    "check_joint",
    "effective",
    "mixture",
    "row_bytes",
    "sampled",
]
