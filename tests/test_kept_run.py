"""A run that an older release began goes on after an update, to the same numbers."""

import json
import math
import shutil

import pytest
from paths import DATA
from test_resume import kept

from lld_jax import config as config_lib
from lld_jax import train
from lld_jax.run import metrics

KEPT = DATA / "kept_run"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A copy of the kept folder, in which its run went on to the end."""
    folder = tmp_path_factory.mktemp("kept") / "kept_run"
    shutil.copytree(KEPT, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = (folder / "run" / "config.json").read_text()
        train.train(config_lib.from_json(text), "run")
    return folder


def test_the_finished_steps_stay_as_they_were(resumed):
    old, new = (
        (folder / "run" / "metrics.jsonl").read_text().splitlines()
        for folder in (KEPT, resumed)
    )
    assert len(old) == 2 and new[:2] == old


def test_the_next_trajectories_are_those_of_the_older_release(resumed):
    for step in (2, 3):
        found, wanted = (
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in (
                resumed / "run" / "trajectories" / f"{step}.jsonl",
                KEPT / "wanted" / f"{step}.jsonl",
            )
        )
        for a, b in zip(found, wanted, strict=True):
            assert a.pop("sampler_logps") == pytest.approx(
                b.pop("sampler_logps"), abs=1e-3
            )
            assert a == b


def test_the_metrics_are_those_of_the_older_release(resumed):
    """Up to what other processors make of the last bits."""
    found, wanted = (
        [kept(line) for line in metrics.read(file)]
        for file in (
            resumed / "run" / "metrics.jsonl",
            KEPT / "wanted" / "metrics.jsonl",
        )
    )
    assert len(found) == len(wanted) == 5
    for a, b in zip(found, wanted, strict=True):
        assert b.keys() <= a.keys()
        for name, value in b.items():
            if isinstance(value, float) and not math.isnan(value):
                assert a[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
            else:
                assert a[name] == value, name
