"""Type aliases used throughout; no behaviour."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array | np.ndarray
Key: TypeAlias = jax.Array
KeyLike: TypeAlias = int | jax.Array
Tree: TypeAlias = Any
