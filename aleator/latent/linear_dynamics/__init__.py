"""Linear dynamics with Gaussian noise: z_t = F z_{t−1} + q_t, y_t = H z_t + r_t; and structural series made of level, trend and seasons."""

from aleator.latent.linear_dynamics._kalman import Kalman, Smoothed, System, draw_states, kalman, smooth, walk
from aleator.latent.linear_dynamics._state_space import StateSpace
from aleator.latent.linear_dynamics.dynamics import Coefficients, LinearDynamics
from aleator.latent.linear_dynamics.structural import Effects, Level, Seasonal, Structural, Trend, Variances

__all__ = [
    "Coefficients",
    "Effects",
    "Kalman",
    "Level",
    "LinearDynamics",
    "Seasonal",
    "Smoothed",
    "StateSpace",
    "Structural",
    "System",
    "Trend",
    "Variances",
    "draw_states",
    "kalman",
    "smooth",
    "walk",
]
