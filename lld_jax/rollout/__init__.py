"""Sampling trajectories: slots, three compiled programs, and the host loop over them.

May import the model, parallel and the protocol. What an environment says is not its
business, nor is training: it knows no reward and no advantage.
"""

from lld_jax.rollout.counters import combined
from lld_jax.rollout.loop import rollout
from lld_jax.rollout.slots import Limits, Sampling, Task, tasks_of

__all__ = ["Limits", "Sampling", "Task", "combined", "rollout", "tasks_of"]
