"""Rollouts of lld_jax, transformers and Tunix side by side, on equal scripted work.

    python -m benchmarks.rollout [--quick] [--all] [--json=FILE] [--seconds=600]
        [--works=A,B,C] [--shapes=tiny,0.2b] [--engines=ours,transformers,tunix]

Each measurement is a process of its own, one at a time, on the same two cores. Tunix
gets a virtual environment of its own, which is made when it is missing, and work B
alone, unless `--all` is given. The tiny shape, which is done in seconds, is run three
times by all engines in turn, and the middle one of each counts. `--quick` takes less
work and under 10 minutes once that environment is there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import comparison, models, report, workloads
from benchmarks.comparison import FASTER, Row
from benchmarks.conditions import CORES, REQUIREMENTS, ROOT, machine

MODULES = {
    "ours": "benchmarks.engines.ours",
    "transformers": "benchmarks.engines.hf_generate",
    "tunix": "benchmarks.engines.tunix_sampler",
}
REPEATS = {"tiny": 3, "0.2b": 1}
WARM_UP = 1200  # seconds that an engine may take beside its timed run


@dataclass(frozen=True)
class Case:
    """One work on one shape; `seconds` is where each engine's timed run is cut."""

    shape: str
    work: str
    trajectories: int
    seconds: float


def make_environment(folder: Path) -> str | None:
    """Makes Tunix's virtual environment if it is not there; why not, if that failed."""
    wanted, installed = REQUIREMENTS.read_text("utf-8"), folder / "installed.txt"
    if installed.exists() and installed.read_text("utf-8") == wanted:
        return None
    print(f"Installing Tunix in {folder} (minutes) ...", file=sys.stderr, flush=True)
    try:
        if not (folder / "bin/python").exists():
            venv.create(folder, with_pip=True)
        pip = [folder / "bin/python", "-m", "pip", "install", "-q", "-r", REQUIREMENTS]
        done = subprocess.run(pip, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no virtual environment at {folder}: {error}"
    if done.returncode:
        return f"pip could not install {REQUIREMENTS.name}: {done.stderr[-500:]}"
    installed.write_text(wanted, encoding="utf-8")
    return None


def _failure(done: subprocess.CompletedProcess) -> str:
    tail = "\n".join(done.stderr.strip().splitlines()[-15:])
    return f"exit status {done.returncode}\n{tail}"


def run_engine(
    engine: str, python: Path, case: Case, model: Path, work: Path, limit: float
) -> Row:
    """One process; `limit` is how many seconds it may take beside its timed run."""
    row = case.shape, case.work, engine, case.trajectories
    out = work.with_name(f"{engine}.json")
    out.unlink(missing_ok=True)
    command = [python, "-m", MODULES[engine], "--model", model, "--work", work]
    command += ["--out", out, "--seconds", str(case.seconds)]
    env = os.environ | {
        "OMP_NUM_THREADS": str(CORES),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=case.seconds + limit,
        )
    except subprocess.TimeoutExpired as error:
        return Row(*row, None, f"stopped after {error.timeout:.0f} seconds")
    if done.returncode or not out.exists():
        return Row(*row, None, _failure(done))
    return Row(*row, json.loads(out.read_text(encoding="utf-8")))


def plan(
    shapes: Sequence[str], works: Sequence[str], quick: bool, seconds: float
) -> list[Case]:
    """The cases in order; the quick ones are cut after less time still."""
    cases = [Case(s, w, 64, seconds) for s in shapes for w in works]
    if not quick:
        return cases
    return [
        Case(c.shape, c.work, *((20, 20.0) if c.shape == "tiny" else (10, 40.0)))
        for c in cases
        if c.shape == "tiny" or c.work == "B"
    ]


def interpreters(args: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    """The Python of each engine, and why an engine is skipped, if it is."""
    python = {engine: Path(sys.executable) for engine in args.engines}
    notes = {}
    if "tunix" in python:
        python["tunix"] = args.tunix_venv.absolute() / "bin/python"
        if note := make_environment(args.tunix_venv.absolute()):
            notes["tunix"] = f"skipped: {note}"
    return python, notes


def run_case(
    args: argparse.Namespace,
    case: Case,
    model: Path,
    work: Path,
    python: Mapping[str, Path],
    notes: Mapping[str, str],
) -> list[Row]:
    """All engines in turn, some times over: the row of each that counts.

    `python` and `notes` are those of `interpreters`.
    """
    # Tunix's compilations take minutes for each work.
    engines = [
        engine
        for engine in args.engines
        if args.all or case.work in FASTER.get(engine, workloads.NAMES)
    ]
    ran: dict[str, list[Row]] = {engine: [] for engine in engines}
    for _ in range(1 if args.quick else REPEATS[case.shape]):
        for engine in engines:
            limit = WARM_UP / 8 if args.quick else WARM_UP
            if note := notes.get(engine):
                about = case.shape, case.work, engine, case.trajectories
                row = Row(*about, None, note)
            else:
                row = run_engine(engine, python[engine], case, model, work, limit)
            ran[engine].append(row)
    return [comparison.middle(some) for some in ran.values()]


def main(args: argparse.Namespace) -> int:
    if args.show:
        return report.show(args.show)
    cases = plan(args.shapes, args.works, args.quick, args.seconds)
    python, notes = interpreters(args)
    if hasattr(os, "sched_setaffinity"):  # engines inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    host = machine()
    if host["load_before"] > 0.5:
        print(
            f"Load {host['load_before']}: other programs on the same cores slow the "
            "engines down unequally; measure on an idle machine.",
            file=sys.stderr,
        )
    rows: list[Row] = []
    sizes = {}
    report.print_head()
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            model = models.folder(case.shape, args.models).absolute()
            config = json.loads((model / "config.json").read_text("utf-8"))
            vocab, sizes[case.shape] = config["vocab_size"], models.parameters(config)
            work = Path(scratch) / "work.json"
            made = workloads.make_work(
                case.work, vocab=vocab, trajectories=case.trajectories
            )
            workloads.save(made, work)
            for row in run_case(args, case, model, work, python, notes):
                rows.append(row)
                report.print_row(row)
            if args.json:  # after each case: a long run that is cut loses little
                report.write(args.json, rows, sizes, args.quick, host)
    wanted = comparison.targets(rows)
    report.print_comparison(rows, wanted, sizes)
    if args.quick:
        print("\nThe goals are about the whole measurement; this was a quick one.")
    for error in {f"{row.engine}: {row.error}" for row in rows if row.error}:
        print(f"\n{error}", file=sys.stderr)
    return int(any(row.error for row in rows))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; lists are comma-separated."""

    def some_of(legal: Sequence[str]):
        def read(text: str) -> list[str]:
            names = text.split(",")
            if not names or set(names) - set(legal):
                raise argparse.ArgumentTypeError(
                    f"{text!r}; legal: some of {','.join(legal)}"
                )
            return names

        return read

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 10 minutes")
    parser.add_argument(
        "--all", action="store_true", help="each engine on works without a goal, too"
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    for name, legal in (
        ("works", workloads.NAMES),
        ("shapes", models.SHAPES),
        ("engines", tuple(MODULES)),
    ):
        parser.add_argument(f"--{name}", type=some_of(legal), default=list(legal))
    parser.add_argument("--show", type=Path, help="print what --json wrote, and end")
    parser.add_argument("--seconds", type=float, default=600.0, help="of a timed run")
    parser.add_argument("--models", type=Path, default=ROOT / "data/benchmarks")
    parser.add_argument("--tunix-venv", type=Path, default=ROOT / ".venv-tunix")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(parse()))
