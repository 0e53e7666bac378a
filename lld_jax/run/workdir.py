"""The folder of a run.

config.json         the resolved config; a run resumes only with an equal one
metrics.jsonl       one line a step; tensorboard/ holds the same
trajectories/       <step>.jsonl, every trajectory that was trained on
checkpoints/        the last ones and the best
export/             the final policy as a Hugging Face folder
summary.json        the result; a folder that has it is a finished run

It lies on a file system or in a bucket (`storage.py`).
"""

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lld_jax import config as config_lib
from lld_jax.protocol.trajectory import Trajectory, to_json
from lld_jax.run import host, storage


def examine(config: ConfigDict, workdir: str | Path) -> Path:
    """Checks that a run with `config` may start or go on in a folder; makes nothing.

    Raises:
      ConfigError: the folder holds a finished run, one with another config (the
        fields are listed), or something else; or it is in a bucket that cannot be
        written.
    """
    workdir = storage.folder(workdir)
    storage.check_writable(workdir)  # first: what cannot be reached has no files either
    saved = workdir / "config.json"
    if (workdir / "summary.json").exists():
        raise config_lib.ConfigError(
            f"workdir: {str(workdir)!r} holds a finished run; choose another folder"
        )
    if saved.exists():
        config_lib.check_resume(config_lib.from_json(saved.read_text()), config)
    elif workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise config_lib.ConfigError(
            f"workdir: {str(workdir)!r} holds something that is no run; legal is a new "
            "or empty folder, or an unfinished run"
        )
    return workdir


def claim(config: ConfigDict, workdir: str | Path) -> Path:
    """Makes the folder of a new run; leaves that of one that goes on as it is.

    Called once everything that the config names could be opened: a start that failed
    leaves no folder behind. Raises what `examine` raises.
    """
    workdir = examine(config, workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / "config.json").exists():  # first: it says that this is a run
        storage.replace(workdir / "config.json", config_lib.to_json(config))
    (workdir / "trajectories").mkdir(exist_ok=True)
    return workdir


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Keeps other processes of this machine out of a claimed folder.

    Two runs in one folder would cut each other's metrics and checkpoints. The lock goes
    with the process, however that ends; a bucket has none. Raises ConfigError if
    another one has it.
    """
    if storage.in_bucket(workdir):
        yield
        return
    with (workdir / "config.json").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise config_lib.ConfigError(
                f"workdir: {str(workdir)!r} is in use by another process; wait for its "
                "end, or choose another folder"
            ) from None
        yield


def write_trajectories(
    workdir: Path, step: int, trajectories: Sequence[Trajectory]
) -> None:
    """One JSON line a trajectory in `trajectories/<step>.jsonl`, replaced whole."""
    lines = [json.dumps(to_json(traj)) + "\n" for traj in trajectories]
    storage.replace(workdir / "trajectories" / f"{step}.jsonl", "".join(lines))


def write_summary(
    workdir: Path, info: dict[str, Any], after: dict[str, float], speeds: dict
) -> dict[str, Any]:
    """Writes `summary.json`, which marks the run as finished, and returns it.

    Args:
      info: `seconds` of the run and the evaluation metrics `before` training.
      after: evaluation metrics after training.
      speeds: `rollout` and `train` tokens per second over the run.
    """
    before = info["before"]

    def pick(what: str) -> dict[str, Any]:
        return {
            mode: {
                when: scores[f"eval/{mode}/{what}"]
                for when, scores in (("before", before), ("after", after))
            }
            for mode in ("greedy", "sampled")
        }

    parts = [k.split("/")[2] for k in after if k.count("/") == 3 and "greedy" in k]
    by = {
        part: {what: pick(f"{part}/{what}") for what in ("exact_match", "searches")}
        | {"questions": int(after[f"eval/greedy/{part}/questions"])}
        for part in dict.fromkeys(parts)
    }
    summary = {
        "exact_match": pick("exact_match"),
        "searches": pick("searches"),
        "questions": int(after["eval/greedy/questions"]),
        "by_hops": {k[4:]: v for k, v in by.items() if re.fullmatch(r"hops\d+", k)},
        "by_set": {k: v for k, v in by.items() if not re.fullmatch(r"hops\d+", k)},
        "seconds": info["seconds"],
        "peak_memory_gib": host.peak_memory_gib(),
        "tokens_per_s": speeds,
        "paths": {
            name: str(workdir / name)
            for name in ("config.json", "metrics.jsonl", "trajectories", "export")
        },
    }
    storage.replace(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary
