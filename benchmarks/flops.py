"""Floating-point operations of a traced program, loops multiplied out.

XLA's own count takes the body of a loop once, however often it runs.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend import core


def of_jaxpr(jaxpr: core.Jaxpr, trips: Sequence[int] = ()) -> int:
    """Multiplications and additions of the matrix products of a jaxpr, on all devices.

    Args:
      trips: how often a `while` at each depth of nesting runs, outermost first; 1
        beyond. (A scan says itself how long it is.)
    """
    return sum(_of_equation(equation, trips) for equation in jaxpr.eqns)


def _of_equation(equation: core.JaxprEqn, trips: Sequence[int]) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _of_product(equation)
    if name == "while":
        times = trips[0] if trips else 1
        return times * of_jaxpr(params["body_jaxpr"].jaxpr, trips[1:])
    if name == "cond":
        return max(of_jaxpr(branch.jaxpr, trips) for branch in params["branches"])
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":  # its body is what one device does
        times = params["mesh"].size
    return times * sum(of_jaxpr(inner, trips) for inner in _inner(params))


def _of_product(equation: core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return (
        2
        * math.prod(equation.outvars[0].aval.shape)
        * math.prod(left[axis] for axis in contracted)
    )


def _inner(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The programs that an equation calls, each once."""
    found = []
    for value in params.values():
        if isinstance(value, core.ClosedJaxpr):
            found.append(value.jaxpr)
        elif isinstance(value, core.Jaxpr):
            found.append(value)
    return found
