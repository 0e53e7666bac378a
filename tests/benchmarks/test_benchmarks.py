"""The works of the benchmarks, and what the rollout benchmark makes of its numbers."""

import copy
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from benchmarks import models, rollout, workloads
from benchmarks.rollout import Row
from benchmarks.workloads import Script, make_work

VOCAB = 2048


# ----- works ----------------------------------------------------------------------


def test_work_a_has_the_stated_lengths():
    work = make_work("A", vocab=VOCAB)
    assert work.latency == 0
    assert len(work.scripts) == 64
    for i, script in enumerate(work.scripts):
        assert (script.draw, script.sample) == divmod(i, 5)
        assert len(script.prompt) == 200
        assert script.actions == [64] * 3
        assert script.observations == [256] * 2
        assert script.length == 200 + 3 * 64 + 2 * 256


def test_work_b_draws_log_normal_actions():
    work = make_work("B", vocab=VOCAB, trajectories=2000)
    assert work.latency == 0.05
    actions = np.array([script.actions for script in work.scripts])
    assert actions.shape == (2000, 3)
    assert actions.min() >= 1 and actions.max() == 256
    assert np.median(actions) == pytest.approx(48, abs=2)
    inner = np.log(actions[(actions > 1) & (actions < 256)])
    # The cut takes the far right end away (1.8 % at 2.1 sigma).
    assert inner.std() == pytest.approx(0.77, abs=0.03)
    assert all(script.observations == [256] * 2 for script in work.scripts)


def test_work_c_has_the_lengths_of_the_table():
    work = make_work("C", vocab=VOCAB)
    assert work.latency == 0.05
    turns = {row[1:] for row in workloads.real_lengths()}
    for script in work.scripts:
        assert len(script.actions) == len(script.observations) + 1
        mixed = [0] * (len(script.actions) + len(script.observations))
        mixed[::2], mixed[1::2] = script.actions, script.observations
        assert tuple(mixed) in turns
        assert min(mixed) > 0
        assert script.length <= 4096
    firsts = {row[0] for row in workloads.real_lengths()}
    assert {len(script.prompt) for script in work.scripts} <= firsts
    assert len({len(script.actions) for script in work.scripts}) > 1


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_group_shares_its_prompt_and_groups_differ(name):
    scripts = make_work(name, vocab=VOCAB).scripts
    prompts = {}
    for script in scripts:
        assert prompts.setdefault(script.draw, script.prompt) == script.prompt
        assert all(0 <= token < VOCAB for token in script.prompt)
    assert len(prompts) == 13  # 12 groups of 5, one of 4
    assert [s.sample for s in scripts if s.draw == 12] == [0, 1, 2, 3]
    assert len(set(map(tuple, prompts.values()))) == 13


@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_draw_is_the_same_each_time_and_a_beginning_of_a_larger_one(name):
    work = make_work(name, vocab=VOCAB)
    assert make_work(name, vocab=VOCAB) == work
    few = make_work(name, vocab=VOCAB, trajectories=12)
    assert few.scripts == work.scripts[:12]


@pytest.mark.parametrize(
    "name, first, tokens",
    [
        ("A", [[64, 64, 64], [64, 64, 64]], 12288),
        ("B", [[53, 43, 80], [52, 31, 64]], 12271),
        ("C", [[72, 11], [57, 11]], 6079),
    ],
)
def test_the_draws_stay_what_was_published(name, first, tokens):
    scripts = make_work(name, vocab=VOCAB).scripts
    assert [script.actions for script in scripts[:2]] == first
    assert sum(sum(script.actions) for script in scripts) == tokens


@pytest.mark.parametrize(
    "name, trajectories, message",
    [
        ("D", 64, "work='D'; legal: A, B, C"),
        ("A", 0, "trajectories=0; legal: 1 or more"),
        ("C", 10**6, "trajectories=1000000; work C has 2"),
    ],
)
def test_illegal_works_are_named(name, trajectories, message):
    with pytest.raises(ValueError, match=message):
        make_work(name, vocab=VOCAB, trajectories=trajectories)


def test_observations_are_seeded_by_trajectory_and_turn():
    script = Script(3, 1, [1, 2], [4, 4, 4], [50, 50])
    ids = workloads.observation_ids(script, 0, VOCAB)
    assert len(ids) == 50 and all(0 <= token < VOCAB for token in ids)
    assert ids == workloads.observation_ids(replace(script, prompt=[9]), 0, VOCAB)
    assert ids != workloads.observation_ids(script, 1, VOCAB)
    assert ids != workloads.observation_ids(replace(script, draw=4), 0, VOCAB)
    assert ids != workloads.observation_ids(replace(script, sample=2), 0, VOCAB)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_work_comes_back_from_its_file(name, tmp_path):
    work = make_work(name, vocab=151936, trajectories=7)
    workloads.save(work, tmp_path / "work.json")
    assert workloads.load(tmp_path / "work.json") == work


def test_the_table_of_real_lengths_is_plausible():
    rows = workloads.real_lengths()
    assert len(rows) == 125 + 1000 + 1000
    assert all(len(row) >= 2 and len(row) % 2 == 0 for row in rows)
    assert max(map(sum, rows)) <= 4096
    prompts = [row[0] for row in rows]
    actions = [n for row in rows for n in row[1::2]]
    observations = [n for row in rows for n in row[2::2]]
    assert 100 < min(prompts) and max(prompts) < 300
    assert 1 <= min(actions) and max(actions) <= 500  # the limit of those runs
    # Up to 500 tokens of passages and the tags around them.
    assert 300 < min(observations) and max(observations) < 520
    # All but two responses end in an answer, which follows a search.
    assert sum(len(row) == 2 for row in rows) == 2
    assert len(observations) == 2234


def test_the_models_are_the_two_shapes(tmp_path):
    config = json.loads((models.folder("tiny", tmp_path) / "config.json").read_text())
    assert config["vocab_size"] == VOCAB
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="shape='0.5b'; legal: tiny, 0.2b"):
        models.folder("0.5b", tmp_path)


# ----- transformers ---------------------------------------------------------------


@pytest.fixture(scope="module")
def hf_generate():
    pytest.importorskip("torch")
    from benchmarks.engines import hf_generate

    return hf_generate


@pytest.fixture(scope="module")
def torch_model(hf_generate, tmp_path_factory):
    return hf_generate.load_model(models.folder("tiny", tmp_path_factory.mktemp("m")))


SCRIPTS = [
    Script(0, 0, [5, 6, 7], [2, 5], [4]),
    Script(0, 1, [5, 6, 7], [3], []),
    Script(1, 0, [8], [1, 2, 3], [4, 6]),
]


def test_transformers_rows_wait_for_the_longest(hf_generate, torch_model):
    work = workloads.Work("A", SCRIPTS, 0.0)
    found = hf_generate.run(torch_model, work, rows=3, seconds=60)
    assert found["complete"] and found["trajectories"] == 3
    assert found["tokens"] == 2 + 5 + 3 + 1 + 2 + 3
    # Three rows wait for 3 tokens, then two for 5, then one has 3.
    assert found["row_steps"] == 3 * 3 + 2 * 5 + 1 * 3
    detail = found["detail"]
    # Each turn reads the whole conversation again, the shorter ones padded.
    assert detail["prefilled"] == (3 + 3 + 1) + (9 + 6) + 14
    assert detail["padded"] == 3 * 3 + 2 * 9 + 14
    assert (detail["calls"], detail["retrievals"]) == (3, 2)


def test_transformers_batches_take_turns(hf_generate, torch_model):
    work = workloads.Work("A", SCRIPTS, 0.0)
    found = hf_generate.run(torch_model, work, rows=2, seconds=60)
    assert found["row_steps"] == (2 * 3 + 1 * 5) + (1 + 2 + 3)
    assert found["detail"]["calls"] == 2 + 3


def test_transformers_stop_at_the_deadline(hf_generate, torch_model):
    work = workloads.Work("A", SCRIPTS, 0.0)
    found = hf_generate.run(torch_model, work, rows=3, seconds=0)
    assert not found["complete"] and found["trajectories"] == 0
    assert found["tokens"] == found["row_steps"] == 3


def test_transformers_sample_the_whole_vocabulary(hf_generate, torch_model):
    import torch

    flat = copy.deepcopy(torch_model)
    with torch.inference_mode():
        flat.model.norm.weight.mul_(0.5)  # the trained model is too sure of itself
    prompt, many = SCRIPTS[0].prompt, 4000
    torch.manual_seed(0)
    stop = hf_generate.AtLengths([1] * many, float("inf"))
    sampled = np.array(hf_generate.generate(flat, [prompt] * many, stop))[:, 0]
    with torch.inference_mode():
        logits = flat(torch.tensor([prompt])).logits[0, -1].double()
    logps = torch.log_softmax(logits, dim=-1).numpy()
    probs = np.exp(logps)
    # The temperature shows in the mean log-prob, a cut in the mass beyond it.
    error = 5 * np.sqrt((probs * logps**2).sum() / many)
    assert logps[sampled].mean() == pytest.approx((probs * logps).sum(), abs=error)
    rare = np.argsort(probs)[:-50]
    assert probs[rare].sum() > 0.5
    assert np.isin(sampled, rare).mean() == pytest.approx(probs[rare].sum(), abs=0.04)


# ----- the driver -----------------------------------------------------------------


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
    assert rollout.rate(found, "trajectories") == 8
    assert rollout.rate(found, "tokens") == 200
    assert rollout.wasted(found) == 0.5
    assert rollout.wasted(found | {"row_steps": 0}) is None


def test_a_ratio_counts_trajectories_or_the_tokens_of_a_run_that_was_cut():
    ours, other = result(64, 1600, 8.0), result(64, 1600, 16.0)
    assert rollout.ratio(ours, other) == (2, "trajectories")
    cut = result(2, 500, 10.0, complete=False)
    assert rollout.ratio(ours, cut) == (4, "tokens")
    assert rollout.ratio(cut, ours) == (0.25, "tokens")


def test_products_with_weights_are_counted():
    config = json.loads((models.folder("tiny", Path()) / "config.json").read_text())
    layers, head = rollout.parameters(config)
    params = safetensors.numpy.load_file(
        models.folder("tiny", Path()) / "model.safetensors"
    )
    kernels = [x for x in params.values() if x.ndim == 2]
    assert (layers + head) == sum(x.size for x in kernels)  # the head is tied
    ours, other = result(64, 1600, 8.0), result(64, 1600, 8.0)
    # 4,000 tokens read and 3,200 rows against 1,000 and 1,600.
    assert rollout.fewer_products(ours, other, 1, 0) == 7200 / 2600
    assert rollout.fewer_products(ours, other, 10, 90) == 360_000 / 170_000
    # Half as many tokens from as much work cost twice the products each.
    half = other | {"tokens": other["tokens"] // 2, "complete": False}
    assert rollout.fewer_products(ours, half, 1, 0) == 2 * 7200 / 2600


def test_the_middle_of_three_runs_counts():
    def row(seconds):
        found = None if seconds is None else result(64, 1600, seconds)
        return rollout.Row("tiny", "A", "ours", 64, found, "why" if not found else None)

    middle = rollout.middle([row(8.0), row(2.0), row(4.0)])
    assert middle.result["seconds"] == 4.0
    assert middle.result["rates"] == [8.0, 16.0, 32.0]
    failed = rollout.middle([row(8.0), row(None), row(4.0)])
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
    found = by_name(rollout.targets(measured))
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
    found = rollout.targets(measured)
    assert [t["value"] for t in found] == [0.5, 0.2, 3, 2]
    assert not any(t["met"] for t in found)


def test_occupancy_and_host_time_are_those_of_the_large_shape():
    poor = {"occupancy": 0.5, "host_exposed": 0.5}
    found = rollout.targets(
        rows("tiny", "B", ours=result(64, 1600, 8.0, detail=poor))
        + rows("0.2b", "A", ours=result(64, 1600, 8.0, detail={"occupancy": 0.5}))
    )
    assert [t["value"] for t in found] == [0.05, 0, 0]
    assert all(t["met"] for t in found)


def test_a_failed_engine_meets_no_target():
    measured = rows("tiny", "B", ours=result(64, 1600, 8.0), tunix=None)
    found = by_name(rollout.targets(measured))
    speed = found["tiny B: trajectories/s, ours to tunix"]
    assert speed["value"] is None and not speed["met"]
    failed = rollout.targets(rows("tiny", "B", ours=None, tunix=result(1, 9, 1.0)))
    assert len(failed) == 3
    assert not any(t["met"] or t["value"] is not None for t in failed)


def test_a_run_that_was_cut_meets_no_target_it_has_no_number_for():
    cut = result(30, 800, 600.0, row_steps=0, complete=False) | {"detail": {}}
    found = rollout.targets(rows("0.2b", "B", ours=cut))
    assert [t["value"] for t in found] == [None, None, None, 0]
    assert [t["met"] for t in found] == [False, False, False, True]


def test_there_are_no_targets_about_what_did_not_run():
    assert rollout.targets(rows("tiny", "A", transformers=result(64, 1600, 8.0))) == []
    measured = rows("tiny", "A", ours=result(64, 1600, 8.0), tunix=result(1, 9, 1.0))
    assert not any("tunix" in name for name in by_name(rollout.targets(measured)))


def test_the_quick_plan_is_a_small_part_of_the_whole():
    args = rollout.parse([])
    whole = rollout.plan(args.shapes, args.works, False, args.seconds)
    assert [(c.shape, c.work) for c in whole] == [
        (shape, work) for shape in ("tiny", "0.2b") for work in "ABC"
    ]
    assert all(c.trajectories == 64 and c.seconds == 600 for c in whole)
    quick = rollout.plan(args.shapes, args.works, True, args.seconds)
    names = [c.shape + c.work for c in quick]
    assert names == ["tinyA", "tinyB", "tinyC", "0.2bB"]
    assert len(args.engines) * sum(case.seconds for case in quick) < 400


def test_the_command_line_names_what_is_legal(capsys):
    assert rollout.parse(["--works=C,A"]).works == ["C", "A"]
    with pytest.raises(SystemExit):
        rollout.parse(["--engines=ours,vllm"])
    assert "legal: some of ours,transformers,tunix" in capsys.readouterr().err


ENGINE = """
import json, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if args["--seconds"] == "3.0":
    sys.exit("this engine fails")
if args["--seconds"] == "0.5":
    time.sleep(60)
scripts = json.load(open(args["--work"]))["scripts"]
tokens = sum(sum(script["actions"]) for script in scripts)
vocab = json.load(open(args["--model"] + "/config.json"))["vocab_size"]
detail = {"decoded": 7, "kept": 7, "vocab": vocab, "occupancy": 0.875}
detail |= {"padded": 90, "extended": 30}
json.dump(
    {"trajectories": len(scripts), "tokens": tokens, "seconds": 2.0,
     "row_steps": 2 * tokens, "compilations": 0, "peak_memory_gib": 0.5,
     "complete": True, "detail": detail},
    open(args["--out"], "w"),
)
"""


@pytest.fixture
def fake_engines(tmp_path, monkeypatch):
    (tmp_path / "fake_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fakes = dict.fromkeys(rollout.MODULES, "fake_engine")
    monkeypatch.setattr(rollout, "MODULES", fakes)
    # The cores of this process are not the test's to choose.
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)


def test_the_driver_runs_engines_and_reports(fake_engines, tmp_path, capsys):
    args = ["--shapes=tiny", "--works=B", "--engines=ours,transformers"]
    args = rollout.parse([*args, f"--json={tmp_path / 'deep/report.json'}"])
    assert rollout.main(args) == 0
    report = json.loads((tmp_path / "deep/report.json").read_text())
    assert [row["engine"] for row in report["rows"]] == ["ours", "transformers"]
    assert all(row["result"]["detail"]["vocab"] == VOCAB for row in report["rows"])
    assert [target["value"] for target in report["targets"]] == [1, 0, 0]
    assert report["machine"]["cores"] == 2
    assert "jax" in report["versions"] and "python" in report["versions"]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    numbers = ["32.000", "6135.5", "50.0%", "0.50", "0", "0.875", "64 of 64"]
    assert ["tiny", "B", "ours", *numbers] in lines
    assert ["tiny", "B", "transformers", "1.00", "trajectories", "2.00"] in lines


def test_the_driver_goes_on_after_an_engine_that_failed(fake_engines, capsys):
    args = ["--shapes=tiny", "--works=A,C", "--engines=ours", "--seconds=3"]
    assert rollout.main(rollout.parse(args)) == 1
    out, err = capsys.readouterr()
    assert out.count("failed") == 2
    assert "ours: exit status 1\nthis engine fails" in err


def test_an_engine_that_hangs_is_stopped(fake_engines, tmp_path):
    case = rollout.Case("tiny", "A", 2, 0.5)
    workloads.save(make_work("A", vocab=VOCAB, trajectories=2), tmp_path / "work.json")
    python, model = Path(sys.executable), models.folder("tiny", tmp_path)
    row = rollout.run_engine("ours", python, case, model, tmp_path / "work.json", 0.5)
    assert row.result is None and row.error == "stopped after 1 seconds"


def test_tunix_is_skipped_where_pip_cannot(tmp_path, monkeypatch):
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("there-is-no-such-package==0.0.0\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/bin/false")
    monkeypatch.setattr(rollout, "REQUIREMENTS", wanted)
    assert "pip could not install wanted.txt" in rollout.make_environment(tmp_path)
    assert not (tmp_path / "installed.txt").exists()
    (tmp_path / "bin/python").unlink()
    (tmp_path / "bin/python").symlink_to("/bin/true")
    assert rollout.make_environment(tmp_path) is None
    assert (tmp_path / "installed.txt").read_text() == wanted.read_text()
