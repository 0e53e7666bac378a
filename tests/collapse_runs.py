"""Made-up raw files of the collapse experiment, and a made-up detector."""

import math
from types import SimpleNamespace

from experiments.collapse import judging, reading

RISE = [0.1] * 10 + [0.6] * 20  # peak .6, first reached by the mean at step 19


def write_run(folder, name, reward, *, final=None, **columns):
    """A CSV as a run writes it: 4 digits, empty cells, the last evaluation alone."""
    folder.mkdir(exist_ok=True)
    header = [*reading.COLUMNS, "extra"]
    lines = [",".join(header)]
    for step, value in enumerate(reward):
        cells = {"step": step, "reward": value, "extra": 7}
        cells |= {column: values[step] for column, values in columns.items()}
        lines.append(
            ",".join(
                f"{cells[c]:.4g}" if c in cells and not math.isnan(cells[c]) else ""
                for c in header
            )
        )
    if final is not None:
        cells = {"step": len(reward), "greedy": final[0], "sampled": final[1]}
        lines.append(",".join(str(cells.get(column, "")) for column in header))
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_raw(raw):
    """grpo: two collapse, one of them before its end; llds: two live, one goes on."""
    fallen = [*RISE, *[0.05] * 25]
    lives = [*RISE, *[0.5] * 25]
    sinks = [-0.5] * 25 + [-1.5] * 30
    write_run(raw, "grpo-0", fallen, final=(0.0, 0.05), logp_correct=sinks)
    write_run(raw, "grpo-1", [0.1, *fallen], logp_correct=[-1.5, *sinks])
    write_run(raw, "grpo-2", lives, final=(0.7, 0.5))
    write_run(raw, "llds-0", lives, final=(0.8, 0.65), logp_correct=sinks)
    write_run(raw, "llds-1", lives[:40])
    write_run(raw, "llds-2", lives, final=(0.9, 0.7), grad_norm=[2.0] * 55)
    write_run(raw, "kl10-0", [0.1] * 4)
    return raw


def detector(watch, record):
    """A fake of diagnosis.phases; the log-prob. of correct trajectories says all."""
    logp = record.get("lld/logp_correct", 0.0)
    name = "collapse" if logp < -2 else "decay" if logp < -1 else "healthy"
    count = (watch or 0) + 1
    return count, SimpleNamespace(name=name, evidence=f"line {count}: {logp:g}")


def judged(folder, observe=detector):
    runs = reading.read_runs(folder)
    return [judging.judge(*key, series, observe) for key, series in runs.items()]
