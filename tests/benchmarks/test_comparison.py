"""What the rollout benchmark makes of its numbers: rates, ratios, and targets."""

import json
from pathlib import Path

import pytest
import safetensors.numpy

from benchmarks import comparison, models, workloads
from benchmarks.comparison import Row


def result(trajectories, tokens, seconds, **rest):
    """A complete engine's result: half of its decode steps wasted."""
    detail = {"occupancy": 0.95, "host_exposed": 0.05, "decoded": 500, "kept": 500}
    detail |= {"padded": 4000, "extended": 1000}
    return {
        "trajectories": trajectories,
        "tokens": tokens,
        "seconds": seconds,
        "row_steps": 2 * tokens,
        "compilations": 0,
        "peak_memory_gib": 1.0,
        "complete": True,
        "detail": detail | rest.pop("detail", {}),
    } | rest


def rows(shape, work, **results):
    return [Row(shape, work, name, 64, found) for name, found in results.items()]


def by_name(found):
    return {target["name"]: target for target in found}


def test_rates_and_waste():
    found = result(64, 1600, 8.0)
    assert comparison.rate(found, "trajectories") == 8
    assert comparison.rate(found, "tokens") == 200
    assert comparison.wasted(found) == 0.5
    assert comparison.wasted(found | {"row_steps": 0}) is None


def test_a_ratio_counts_trajectories_or_the_tokens_of_a_run_that_was_cut():
    ours, other = result(64, 1600, 8.0), result(64, 1600, 16.0)
    assert comparison.ratio(ours, other) == (2, "trajectories")
    cut = result(2, 500, 10.0, complete=False)
    assert comparison.ratio(ours, cut) == (4, "tokens")
    assert comparison.ratio(cut, ours) == (0.25, "tokens")


def test_products_with_weights_are_counted():
    config = json.loads((models.folder("tiny", Path()) / "config.json").read_text())
    layers, head = models.parameters(config)
    params = safetensors.numpy.load_file(
        models.folder("tiny", Path()) / "model.safetensors"
    )
    kernels = [x for x in params.values() if x.ndim == 2]
    assert (layers + head) == sum(x.size for x in kernels)  # the head is tied
    ours, other = result(64, 1600, 8.0), result(64, 1600, 8.0)
    # 4,000 tokens read and 3,200 rows against 1,000 and 1,600.
    assert comparison.fewer_products(ours, other, 1, 0) == 7200 / 2600
    assert comparison.fewer_products(ours, other, 10, 90) == 360_000 / 170_000
    # Half as many tokens from as much work cost twice the products each.
    half = other | {"tokens": other["tokens"] // 2, "complete": False}
    assert comparison.fewer_products(ours, half, 1, 0) == 2 * 7200 / 2600


def test_the_middle_of_three_runs_counts():
    def row(seconds):
        found = None if seconds is None else result(64, 1600, seconds)
        return Row("tiny", "A", "ours", 64, found, "why" if not found else None)

    middle = comparison.middle([row(8.0), row(2.0), row(4.0)])
    assert middle.result["seconds"] == 4.0
    assert middle.result["rates"] == [8.0, 16.0, 32.0]
    failed = comparison.middle([row(8.0), row(None), row(4.0)])
    assert failed.result is None and failed.error == "why"


def test_targets_of_a_whole_run():
    slow = result(64, 1600, 32.0)
    measured = [
        row
        for shape in models.SHAPES
        for work in workloads.NAMES
        for row in rows(
            shape,
            work,
            ours=result(64, 1600, 8.0, detail={"host_exposed": 0.02 * ord(work) - 1.3}),
            transformers=slow,
            tunix=slow,
        )
    ]
    found = by_name(comparison.targets(measured))
    speed = {name: t for name, t in found.items() if "ours to" in name}
    assert {name: (t["value"], t["goal"], t["met"]) for name, t in speed.items()} == {
        f"{shape} {work}: trajectories/s, ours to {other}": (4, goal, goal <= 4)
        for shape in models.SHAPES
        for other, work, goal in [
            ("transformers", "A", 3),
            ("transformers", "B", 5),
            ("transformers", "C", 5),
            ("tunix", "B", 5),
        ]
    }
    assert all(target["better"] == "higher" for target in speed.values())
    rest = [target for name, target in found.items() if name not in speed]
    assert [(t["goal"], t["better"], t["met"]) for t in rest] == [
        (0.9, "higher", True),
        (0.1, "lower", True),
        (0, "lower", True),
        (0, "lower", True),
    ]
    assert [t["value"] for t in rest] == pytest.approx([0.95, 0.04, 0, 0])


def test_one_bad_row_misses_the_target():
    wasteful = {"decoded": 503, "occupancy": 0.5, "host_exposed": 0.2}
    measured = rows("0.2b", "A", ours=result(64, 1600, 8.0)) + rows(
        "0.2b", "B", ours=result(64, 1600, 8.0, compilations=2, detail=wasteful)
    )
    found = comparison.targets(measured)
    assert [t["value"] for t in found] == [0.5, 0.2, 3, 2]
    assert not any(t["met"] for t in found)


def test_occupancy_and_host_time_are_those_of_the_large_shape():
    poor = {"occupancy": 0.5, "host_exposed": 0.5}
    found = comparison.targets(
        rows("tiny", "B", ours=result(64, 1600, 8.0, detail=poor))
        + rows("0.2b", "A", ours=result(64, 1600, 8.0, detail={"occupancy": 0.5}))
    )
    assert [t["value"] for t in found] == [0.05, 0, 0]
    assert all(t["met"] for t in found)


def test_a_failed_engine_meets_no_target():
    measured = rows("tiny", "B", ours=result(64, 1600, 8.0), tunix=None)
    found = by_name(comparison.targets(measured))
    speed = found["tiny B: trajectories/s, ours to tunix"]
    assert speed["value"] is None and not speed["met"]
    failed = comparison.targets(rows("tiny", "B", ours=None, tunix=result(1, 9, 1.0)))
    assert len(failed) == 3
    assert not any(t["met"] or t["value"] is not None for t in failed)


def test_a_run_that_was_cut_meets_no_target_it_has_no_number_for():
    cut = result(30, 800, 600.0, row_steps=0, complete=False) | {"detail": {}}
    found = comparison.targets(rows("0.2b", "B", ours=cut))
    assert [t["value"] for t in found] == [None, None, None, 0]
    assert [t["met"] for t in found] == [False, False, False, True]


def test_there_are_no_targets_about_what_did_not_run():
    measured = rows("tiny", "A", transformers=result(64, 1600, 8.0))
    assert comparison.targets(measured) == []
    measured = rows("tiny", "A", ours=result(64, 1600, 8.0), tunix=result(1, 9, 1.0))
    assert not any("tunix" in name for name in by_name(comparison.targets(measured)))
