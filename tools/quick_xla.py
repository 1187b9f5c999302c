"""Print the XLA flags under which tests compile quickly: those of FLAGS that this jaxlib knows, because an unknown one ends the process.

The flags leave out the expensive passes. Programs are the same but for rounding, are compiled about four times as fast and run three to six times as slow,
which is a good bargain for tests: nearly all of their time is compilation.
"""

from __future__ import annotations

import os
import subprocess
import sys

FLAGS = ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false")


def known(flag: str) -> bool:
    """Whether a process with this flag starts."""
    environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    print(" ".join(flag for flag in FLAGS if known(flag)))
