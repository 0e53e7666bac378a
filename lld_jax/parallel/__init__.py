"""The device mesh and its layouts; processes: how they meet, talk, stop and part.

May import config alone. What is computed on a mesh belongs to the model or to training.
"""

from lld_jax.parallel.mesh import (
    AXES,
    Layout,
    global_array,
    local_mesh,
    make_mesh,
    param_shardings,
    rollout_layout,
    spec_of,
    state_shardings,
    to_local,
    train_layout,
)

__all__ = [
    "AXES",
    "Layout",
    "global_array",
    "local_mesh",
    "make_mesh",
    "param_shardings",
    "rollout_layout",
    "spec_of",
    "state_shardings",
    "to_local",
    "train_layout",
]
