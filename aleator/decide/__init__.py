"""What a posterior is good for: calibration, regions with guaranteed coverage, strange rows, labels worth having, actions that pay."""

from aleator.decide import acquisition, active, calibration, conditioning, conformal, ood, recalibration, utility
from aleator.decide.recalibration import recalibrate
from aleator.decide.utility import (
    best_action,
    cvar,
    expected,
    exponential,
    mean_variance,
    plug_in,
    realised,
    scenarios,
    value_of_knowing,
    value_of_label,
    value_of_model,
)

__all__ = [
    "acquisition",
    "active",
    "best_action",
    "calibration",
    "conditioning",
    "conformal",
    "cvar",
    "expected",
    "exponential",
    "mean_variance",
    "ood",
    "plug_in",
    "realised",
    "recalibrate",
    "recalibration",
    "scenarios",
    "utility",
    "value_of_knowing",
    "value_of_label",
    "value_of_model",
]
