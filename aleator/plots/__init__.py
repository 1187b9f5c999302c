"""Pictures. Every function draws on the Axes it is given, or makes one, and returns it.

Colours are from the palette of Okabe and Ito, told apart by readers with any kind of colour vision, and fixed: blue is always what more
data would remove (epistemic), orange always what it would not (aleatoric).
"""

from aleator.plots._check import effects, relevance, split, traces, truth
from aleator.plots._decide import decisions, field, learning_curves, pit, reliability, risk_coverage, roc, strangeness
from aleator.plots._road import (
    ALEATORIC,
    ALEATORIC_FILL,
    DATA,
    EPISTEMIC,
    EPISTEMIC_FILL,
    HIGHLIGHT,
    LOW_ALPHA,
    MEAN,
    alphas,
    axes,
    elbo,
    evidence,
    function_draws,
    functions,
    gradient_variance,
    prior,
    regression,
    save,
    sensitivity,
    uncertainty,
    weights,
)

__all__ = [
    "ALEATORIC",
    "ALEATORIC_FILL",
    "DATA",
    "EPISTEMIC",
    "EPISTEMIC_FILL",
    "HIGHLIGHT",
    "LOW_ALPHA",
    "MEAN",
    "alphas",
    "axes",
    "decisions",
    "effects",
    "elbo",
    "evidence",
    "field",
    "function_draws",
    "functions",
    "gradient_variance",
    "learning_curves",
    "pit",
    "prior",
    "regression",
    "relevance",
    "reliability",
    "risk_coverage",
    "roc",
    "save",
    "sensitivity",
    "split",
    "strangeness",
    "traces",
    "truth",
    "uncertainty",
    "weights",
]
