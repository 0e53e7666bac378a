"""How much does LLDS do on rounding alone, while the policy has not moved?

    python -m experiments.rounding.run [--quick] [--out=DIR]

Old and new log-probs are those of the same parameters, so in exact arithmetic every
drop is 0: no gate opens and LLDS has no gradient. Here the old ones come from other
programs than the new ones, and what LLDS makes of the difference is compared with the
gradient of the policy loss. Prints a table and writes DIR/results.json; `--quick`
takes the random policy alone, smaller.
"""

import argparse
import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.rounding import cases, programs
from experiments.rounding.cases import Case
from experiments.rounding.programs import SETTINGS, Program
from lld_jax import losses
from lld_jax.run import host

DTYPES = ("float32", "bfloat16")
FIRST, SAME = "`first`: none are read", "the update's program itself"
# Programs that compute log-probs and nothing else.
SCORED = {
    "a scoring program, 4 rows as in the update": {},
    "the same, 1 row": {"rows": 1},
    "the same, 8 rows": {"rows": 8},
    "the same, 16 rows": {"rows": 16},
    "other attention blocks (32 queries)": {"block": 32},
    "other vocabulary chunks (32 positions)": {"chunk": 32},
    "rows padded by 64": {"padding": 64},
}
OTHER_DTYPE, CACHED = "the other dtype", "token by token, with a cache"
CONDITIONS = (FIRST, SAME, *SCORED, OTHER_DTYPE, CACHED)


def old_logps(case: Case, how: Program, name: str) -> jax.Array:
    """Log-probs `[B, T]` of any condition but the first two."""
    if name == CACHED:
        return programs.score_cached(case, how)
    (other,) = set(DTYPES) - {how.dtype}
    change = {"dtype": other} if name == OTHER_DTYPE else SCORED[name]
    return programs.score(case, dataclasses.replace(how, **change))


def shares(
    logps: jax.Array, old: jax.Array, batch: dict[str, Any], first: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """Open gates and penalised tokens of the preserving set, each by kind of gate."""
    found = _sums(logps, old, batch, first).items()
    opened = {gate: float(x["open_gates"] / x["gates"]) for gate, x in found}
    return opened, {gate: float(x["penalised"] / x["preserved"]) for gate, x in found}


@jax.jit
def _sums(logps, old, batch, first):
    zeros = jnp.zeros_like(logps)
    batch = batch | {"old_logps": old, "ref_logps": zeros}
    weights = _weights(batch)  # the same for every gate
    kinds = {g: dataclasses.replace(SETTINGS, llds_gate=g) for g in losses.GATES}
    return {
        gate: losses.objective(logps, zeros, batch, weights, settings, first=first)[1]
        for gate, settings in kinds.items()
    }


@jax.jit
def _weights(batch):
    return losses.weights(
        batch["mask"], batch["advantages"], SETTINGS, segments=batch["segments"]
    )


def measure(
    case: Case, dtype: str, conditions: Sequence[str] = CONDITIONS
) -> list[dict[str, Any]]:
    """A row of results per condition, for updates that compute in `dtype`."""
    how = Program(dtype)
    train = programs.trainer(case, how)
    weights, keep = _weights(case.batch), case.batch["mask"] != 0
    # The normalisers differ by this factor alone, and so do the gradients.
    all_tokens = float(weights.tokens.max() / weights.llds.max())
    surrogate = weights._replace(llds=jnp.zeros_like(weights.llds))
    llds = weights._replace(policy=jnp.zeros_like(weights.policy))

    nothing = jnp.full(keep.shape, jnp.nan)  # what `first` must not read
    same, policy_norm = train(surrogate, nothing, True)

    def row(name: str, old: jax.Array) -> dict[str, Any]:
        first = name == FIRST
        logps, norm = train(llds, old, first)
        drop = jnp.abs(losses.likelihood_drop(logps, logps if first else old, keep))
        opened, penalised = shares(logps, old, case.batch, first)
        preserved = float(norm / policy_norm)
        return {
            "policy": case.name,
            "dtype": dtype,
            "old": name,
            "mean_difference": float(drop.sum() / keep.sum()),
            "max_difference": float(drop.max()),
            "open_gates": opened,
            "penalised": penalised,
            "gradient": {"preserved": preserved, "all": preserved * all_tokens},
        }

    own = {FIRST: nothing, SAME: same}
    return [
        row(name, own[name] if name in own else old_logps(case, how, name))
        for name in conditions
    ]


def describe(case: Case) -> dict[str, Any]:
    """Sizes of a case."""
    mask, segments = (case.batch[name] for name in ("mask", "segments"))
    preserved = (mask != 0) & (case.batch["advantages"] >= 0)
    actions = np.asarray(losses.action_ids(preserved, segments)).max(1)
    return {
        "rows": len(mask),
        "row_tokens": mask.shape[1],
        "action_tokens": int(mask.sum()),
        "preserved_tokens": int(preserved.sum()),
        "preserved_actions": int(actions.sum()),
        "preserved_rows": int((actions > 0).sum()),
        "zero_advantage_rows": int((case.batch["advantages"] == 0).all(1).sum()),
        "model": dataclasses.asdict(case.model),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| policy | dtype | old log-probs from | mean, max difference | "
        "open gates: action, response, token | penalised tokens | "
        "LLDS / surrogate: preserved, all |",
        "|" + " --- |" * 7,
    ]

    def percent(share: float) -> str:
        return f"{100 * share:.0f}" if share else "0"

    for row in rows:
        sizes = (row["mean_difference"], row["max_difference"])
        cells = (
            row["policy"],
            row["dtype"],
            row["old"],
            ", ".join(f"{x:.1g}" for x in sizes),
            ", ".join(percent(row["open_gates"][gate]) for gate in losses.GATES) + " %",
            percent(row["penalised"]["action"]) + " %",
            ", ".join(f"{x:.2g}" for x in row["gradient"].values()),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(some: list[Case]) -> dict[str, Any]:
    """The report on some cases."""
    device = jax.devices()[0]
    return {
        "settings": dataclasses.asdict(SETTINGS),
        "device": f"{device.platform}, {device.device_kind}",
        "machine": platform.machine(),
        "jax": jax.__version__,
        "cases": {case.name: describe(case) for case in some},
        "rows": [
            row for case in some for dtype in DTYPES for row in measure(case, dtype)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="default: beside this file, or if quick, runs/rounding"
    )
    args = parser.parse_args()
    host.keep_freed_memory()
    if args.quick:
        smaller = dataclasses.replace(
            cases.RANDOM, width=128, mlp=384, head_dim=32, vocab=1024
        )
        some = [cases.random_case(rows=32, config=smaller)]
    else:
        some = [cases.random_case(), cases.tiny_case()]
    report = run(some)
    print(table(report["rows"]))
    out = args.out or (Path("runs/rounding") if args.quick else Path(__file__).parent)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
