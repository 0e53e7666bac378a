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
import platform
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from benchmarks import models, workloads

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "benchmarks/engines/tunix.txt"
MODULES = {
    "ours": "benchmarks.engines.ours",
    "transformers": "benchmarks.engines.hf_generate",
    "tunix": "benchmarks.engines.tunix_sampler",
}
CORES = 2
REPEATS = {"tiny": 3, "0.2b": 1}
WARM_UP = 1200  # seconds that an engine may take beside its timed run
# Least ratios of our rate to another engine's, by engine and work.
FASTER = {"transformers": {"A": 3, "B": 5, "C": 5}, "tunix": {"B": 5}}
COLUMNS = {
    "shape": 5,
    "work": 4,
    "engine": 12,
    "trajectories/s": 14,
    "tokens/s": 8,
    "wasted steps": 12,
    "peak GiB": 8,
    "compilations": 12,
    "occupancy": 9,
    "finished": 10,
}


@dataclass(frozen=True)
class Case:
    """One work on one shape; `seconds` is where each engine's timed run is cut."""

    shape: str
    work: str
    trajectories: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """What one engine did in one case.

    `result` is the JSON of the engine (see `benchmarks.engines`), or None, and then
    `error` says why.
    """

    shape: str
    work: str
    engine: str
    trajectories: int
    result: dict | None
    error: str | None = None


# ----- arithmetic -----------------------------------------------------------------


def rate(result: dict, unit: str) -> float:
    """'trajectories' (finished ones) or 'tokens' (of actions) per second."""
    return result[unit] / result["seconds"]


def wasted(result: dict) -> float | None:
    """The share of the decode steps, summed over rows, that gave no token.

    None if the engine could not count its steps.
    """
    steps = result["row_steps"]
    return 1 - result["tokens"] / steps if steps else None


def ratio(ours: dict, other: dict) -> tuple[float, str]:
    """Our rate through another's, and its unit.

    The unit is trajectories, or tokens if one of the two was cut: a static batch that
    is nearly done has finished nothing.
    """
    unit = "trajectories" if ours["complete"] and other["complete"] else "tokens"
    return rate(ours, unit) / rate(other, unit), unit


def ratios(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[float, str] | None]:
    """`ratio` by (shape, work, other engine); None where one of the two failed."""
    ours = {(r.shape, r.work): r.result for r in rows if r.engine == "ours"}
    found = {}
    for row in rows:
        if row.engine != "ours" and (row.shape, row.work) in ours:
            mine = ours[row.shape, row.work]
            ran = mine is not None and row.result is not None
            key = row.shape, row.work, row.engine
            found[key] = ratio(mine, row.result) if ran else None
    return found


def parameters(config: dict) -> tuple[int, int]:
    """Weights that a token meets in the layers, and in the head, of a Qwen2 model."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * width // heads
    layer = 2 * width * (width + keys) + 3 * width * config["intermediate_size"]
    return config["num_hidden_layers"] * layer, config["vocab_size"] * width


def fewer_products(ours: dict, other: dict, layers: int, head: int) -> float:
    """How many times fewer products ours needs: the ratio if both made them as fast.

    Products with the weights alone, per token of an action: a token that is read meets
    those of the layers, a row of a decode step those of the head as well; all rows of
    the other engine count, and of ours those that gave a token. A higher ratio of rates
    says that a product, or what lies around it, takes the other engine longer.
    """
    read = other["detail"]["padded"] * layers
    theirs = read + other["row_steps"] * (layers + head)
    needed = ours["detail"]["extended"] * layers + ours["tokens"] * (layers + head)
    return theirs / other["tokens"] / (needed / ours["tokens"])


def _target(name: str, value: float | None, goal: float, better: str) -> dict:
    sign = 1 if better == "higher" else -1
    met = value is not None and sign * value >= sign * goal
    return dict(name=name, value=value, goal=goal, better=better, met=met)


def targets(rows: Sequence[Row]) -> list[dict]:
    """The targets that these rows are about; `value` is None where an engine failed."""
    found = []
    for (shape, work, other), measured in ratios(rows).items():
        goal = FASTER[other].get(work)
        if goal is not None:
            value, unit = measured or (None, "trajectories")
            name = f"{shape} {work}: {unit}/s, ours to {other}"
            found.append(_target(name, value, goal, "higher"))
    ours = [row for row in rows if row.engine == "ours"]

    large = [row for row in ours if row.shape == "0.2b"]
    busy = [row for row in large if row.work == "B"]
    for name, chosen, measure, combine, goal, better in (
        ("0.2b B: occupancy of the rows", busy, _occupancy, min, 0.9, "higher"),
        ("0.2b: share of time that the host costs", large, _host, max, 0.1, "lower"),
        ("tokens thrown away after a stop", ours, _thrown, sum, 0, "lower"),
        ("compilations after the warm-up", ours, _compilations, sum, 0, "lower"),
    ):
        if chosen:
            values = [row.result and measure(row.result) for row in chosen]
            value = None if None in values else combine(values)
            found.append(_target(name, value, goal, better))
    return found


def _occupancy(result: dict) -> float | None:
    return result["detail"].get("occupancy")


def _host(result: dict) -> float | None:
    return result["detail"].get("host_exposed")


def _thrown(result: dict) -> int | None:
    decoded, kept = (result["detail"].get(name) for name in ("decoded", "kept"))
    return None if None in (decoded, kept) else decoded - kept


def _compilations(result: dict) -> int:
    return result["compilations"]


# ----- processes ------------------------------------------------------------------


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


def middle(rows: Sequence[Row]) -> Row:
    """The row in the middle by rate, with the `rates` of all; a failed one if any."""
    failed = [row for row in rows if row.result is None]
    if failed:
        return failed[0]
    rows = sorted(rows, key=lambda row: rate(row.result, "tokens"))
    rates = [rate(row.result, "trajectories") for row in rows]
    row = rows[len(rows) // 2]
    return replace(row, result=row.result | {"rates": rates})


def machine() -> dict:
    """Processor, the cores that the engines had, memory, and the load before."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": (names or [platform.processor()])[0],
        "cores": CORES,
        "memory_gib": round(memory, 1),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Of Python, the packages here, and what Tunix's environment asks for."""
    packages = "jax", "jaxlib", "flax", "numpy", "torch", "transformers"
    found = {d.name: d.version for d in metadata.distributions()}
    kept = {name: found[name] for name in packages if name in found}
    pins = [p.split("==") for p in REQUIREMENTS.read_text("utf-8").split() if "==" in p]
    tunix = {f"tunix: {name}": version for name, version in pins}
    return {"python": platform.python_version()} | kept | tunix


# ----- the report -----------------------------------------------------------------


def _line(cells: Sequence[object], widths: Sequence[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    return "| " + " | ".join(str(cell).ljust(width) for cell, width in pairs) + " |"


def _print_head(names: Sequence[str], widths: Sequence[int]) -> None:
    print(_line(names, widths))
    print(_line(["-" * width for width in widths], widths), flush=True)


def _print_row(row: Row) -> None:
    first = [row.shape, row.work, row.engine]
    result = row.result
    if result is None:
        cells = first + ["failed"] + ["-"] * (len(COLUMNS) - 4)
    else:
        waste, occupancy = wasted(result), _occupancy(result)
        cells = first + [
            f"{rate(result, 'trajectories'):.3f}",
            f"{rate(result, 'tokens'):.1f}",
            "-" if waste is None else f"{waste:.1%}",
            f"{result['peak_memory_gib']:.2f}",
            result["compilations"],
            "-" if occupancy is None else f"{occupancy:.3f}",
            f"{result['trajectories']} of {row.trajectories}",
        ]
    print(_line(cells, list(COLUMNS.values())), flush=True)


def _print_comparison(
    rows: Sequence[Row], wanted: Sequence[dict], sizes: dict[str, tuple[int, int]]
) -> None:
    """`sizes`: what `parameters` says of each shape."""
    widths = 5, 4, 22, 7, 12, 9
    results = {(row.shape, row.work, row.engine): row.result for row in rows}
    compared = ratios(rows)
    if compared:
        print()
        names = "shape", "work", "ours to", "ratio", "rates of", "products"
        _print_head(names, widths)
    for (shape, work, other), measured in compared.items():
        value, unit, most = "-", "-", "-"
        if measured:
            value, unit = f"{measured[0]:.2f}", measured[1]
            both = results[shape, work, "ours"], results[shape, work, other]
            # An engine that was cut counts by what it had done: early turns are short,
            # so it is the least that it would come to.
            if both[0]["complete"] and both[1]["tokens"]:
                most = f"{fewer_products(*both, *sizes[shape]):.2f}"
        print(_line((shape, work, other, value, unit, most), widths))
    widths = max([6, *(len(target["name"]) for target in wanted)]), 8, 8, 3
    if wanted:
        print()
        _print_head(("target", "value", "goal", "met"), widths)
    for target in wanted:
        sign = "≥" if target["better"] == "higher" else "≤"
        value = "-" if target["value"] is None else f"{target['value']:.3g}"
        met = "yes" if target["met"] else "no"
        print(_line((target["name"], value, f"{sign} {target['goal']}", met), widths))


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


def show(path: Path) -> int:
    """Prints the tables of a file that a run wrote."""
    report = json.loads(path.read_text("utf-8"))
    rows = [Row(**row) for row in report["rows"]]
    _print_head(list(COLUMNS), list(COLUMNS.values()))
    for row in rows:
        _print_row(row)
    _print_comparison(rows, report["targets"], report["parameters"])
    return 0


def main(args: argparse.Namespace) -> int:
    if args.show:
        return show(args.show)
    cases = plan(args.shapes, args.works, args.quick, args.seconds)
    python = {engine: Path(sys.executable) for engine in args.engines}
    notes = {}
    if "tunix" in python:
        python["tunix"] = args.tunix_venv.absolute() / "bin/python"
        if note := make_environment(args.tunix_venv.absolute()):
            notes["tunix"] = f"skipped: {note}"
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
    _print_head(list(COLUMNS), list(COLUMNS.values()))
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            model = models.folder(case.shape, args.models).absolute()
            config = json.loads((model / "config.json").read_text("utf-8"))
            vocab, sizes[case.shape] = config["vocab_size"], parameters(config)
            work = Path(scratch) / "work.json"
            made = workloads.make_work(
                case.work, vocab=vocab, trajectories=case.trajectories
            )
            workloads.save(made, work)
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
                        row = run_engine(
                            engine, python[engine], case, model, work, limit
                        )
                    ran[engine].append(row)
            for some in ran.values():
                rows.append(middle(some))
                _print_row(rows[-1])
            if args.json:  # after each case: a long run that is cut loses little
                _write(args.json, rows, sizes, args.quick, host)
    wanted = targets(rows)
    _print_comparison(rows, wanted, sizes)
    if args.quick:
        print("\nThe goals are about the whole measurement; this was a quick one.")
    for error in {f"{row.engine}: {row.error}" for row in rows if row.error}:
        print(f"\n{error}", file=sys.stderr)
    return int(any(row.error for row in rows))


def _write(
    path: Path,
    rows: Sequence[Row],
    sizes: dict[str, tuple[int, int]],
    quick: bool,
    host: dict,
) -> None:
    report = {
        "targets": targets(rows),
        "rows": [asdict(row) for row in rows],
        "parameters": sizes,
        "quick": quick,
        "machine": host,
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


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
