"""Runs settings and seeds of the collapse experiment, several at a time.

    python -m experiments.collapse.run [--settings=grpo,llds] [--seeds=0,1,2,3,4]
        [--jobs=2] [--quick] [--runs=runs/collapse] [-- --config.optim.lr=3e-4 ...]

A run is a process of `lld_jax.main` on a core of its own. The same seed gives every
setting the same questions and the same draws. What is finished is left alone and what
was killed goes on, so the same command may be given again; the raw metrics of each run
go to `raw/<setting>-<seed>.csv` when it ends. `--quick` takes two seeds and 60 steps,
in folders of its own: `runs/collapse_quick`, and `raw` in it.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from experiments.collapse import start
from experiments.collapse.columns import COLUMNS
from experiments.collapse.config import SETTINGS, get_config
from lld_jax.data import questions, world
from lld_jax.run import metrics

ROOT = Path(__file__).parents[2]
RAW = Path(__file__).parent / "raw"
DATA = Path("data/collapse")
FEW = 20


def prepare(folder: Path) -> None:
    """Writes the questions and the policy to start from, if they are not there.

    The questions are those of the tiny world that `start.is_asked` lets through. The
    world's own files are made as well, before several runs at a time would make them.
    """
    config = get_config("grpo")
    questions.prepare_world(ROOT / config.data_dir, **config.world)
    made = world.generate(config.world.seed, config.world.size)
    asked = {
        split: [
            {"id": q.id, "question": q.question, "golden_answers": q.golden_answers}
            for q in made.questions[split]
            if start.is_asked(q)
        ]
        for split in ("train", "validation_unseen")
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        ("train", asked["train"]),
        ("few", asked["train"][:FEW]),  # what is left if no question is new
        ("held_out", asked["validation_unseen"]),
    ):
        path = folder / f"{name}.jsonl"
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        scratch.replace(path)
    if not (folder / "start").exists():
        start.write(folder / "start")


def write_raw(workdir: Path, out: Path) -> int:
    """Metrics of a run as CSV with four digits; returns how many steps there are.

    A metric that a step does not have leaves its cell empty.
    """
    path = workdir / "metrics.jsonl"
    records = metrics.read(path) if path.exists() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_suffix(".tmp")
    with scratch.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *COLUMNS])
        for record in records:
            cells = [record.get(name) for name in COLUMNS.values()]
            cells = ["" if x is None else f"{x:.4g}" for x in cells]
            writer.writerow([record["step"], *cells])
    scratch.replace(out)
    return len(records)


def command(setting: str, seed: int, workdir: Path, extra: Sequence[str]) -> list[str]:
    """The command line of one run."""
    config = f"{Path(__file__).parent / 'config.py'}:{setting}"
    return [
        sys.executable,
        "-m",
        "lld_jax.main",
        f"--config={config}",
        f"--workdir={workdir}",
        f"--config.seed={seed}",
        *extra,
    ]


def log_of(workdir: Path) -> Path:
    """What a run prints goes beside its folder."""
    return workdir.with_name(f"{workdir.name}.log")


def run_all(
    todo: Sequence[tuple[str, int]], runs: Path, jobs: int, extra: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    """Yields `(setting, seed, exit status)` as runs end, at most `jobs` at a time.

    Each has a core of its own, as far as there are; output goes to `<run>.log`.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    free = deque(range(jobs))
    queue, live = deque(todo), {}
    try:
        while queue or live:
            while queue and free:
                setting, seed = queue.popleft()
                workdir, slot = runs / f"{setting}-{seed}", free.popleft()
                runs.mkdir(parents=True, exist_ok=True)
                core = {cores[slot % len(cores)]} if len(cores) >= jobs else None
                with log_of(workdir).open("a") as log:
                    process = subprocess.Popen(
                        command(setting, seed, workdir, extra),
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                    )
                if core:
                    os.sched_setaffinity(process.pid, core)
                live[process] = (setting, seed, slot)
            for process in [p for p in live if p.poll() is not None]:
                setting, seed, slot = live.pop(process)
                free.append(slot)
                yield setting, seed, process.returncode
            time.sleep(0.5)
    finally:
        for process in live:  # they save what they have
            process.terminate()
        for process in live:
            process.wait()


def main(args: argparse.Namespace) -> int:
    prepare(ROOT / DATA)
    extra = list(args.extra) + (["--config.steps=60"] if args.quick else [])
    seeds = args.seeds[:2] if args.quick else args.seeds
    # Seed by seed: whenever it is stopped, there are pairs.
    todo = []
    for setting, seed in ((x, seed) for seed in seeds for x in args.settings):
        workdir = args.runs / f"{setting}-{seed}"
        if (workdir / "summary.json").exists():  # ended, maybe after its runner
            write_raw(workdir, args.raw / f"{setting}-{seed}.csv")
        else:
            todo.append((setting, seed))
    failed = 0
    with tqdm(total=len(todo), unit="run") as bar:
        for setting, seed, status in run_all(todo, args.runs, args.jobs, extra):
            workdir = args.runs / f"{setting}-{seed}"
            write_raw(workdir, args.raw / f"{setting}-{seed}.csv")
            if status:
                failed += 1
                bar.write(f"{setting}, seed {seed}: exit {status}: {log_of(workdir)}")
            bar.update()
    return int(failed > 0)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def settings(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - SETTINGS.keys():
            raise argparse.ArgumentTypeError(
                f"{', '.join(sorted(unknown))}; legal: some of {','.join(SETTINGS)}"
            )
        return names

    def jobs(text: str) -> int:
        number = int(text) if text.isdecimal() else 0
        if not number:
            raise argparse.ArgumentTypeError(f"{text!r}; legal: 1 or more")
        return number

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", type=settings, default=["grpo", "llds"])
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[0, 1, 2, 3, 4],
    )
    parser.add_argument("--jobs", type=jobs, default=2, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="2 seeds of 60 steps")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("extra", nargs="*", help="flags of lld_jax.main, after --")
    args = parser.parse_args(argv)
    # A short run must not pass for a whole one, nor replace its metrics.
    name = "collapse_quick" if args.quick else "collapse"
    args.runs = args.runs or ROOT / "runs" / name
    args.raw = args.raw or (args.runs / "raw" if args.quick else RAW)
    return args


if __name__ == "__main__":
    # Ended from outside, it ends its runs too: two of them in one folder would clash.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(parse()))
