"""Rollouts with transformers: batches that wait, and what they sample."""

import copy

import numpy as np
import pytest

from benchmarks import models, workloads
from benchmarks.workloads import Script

SCRIPTS = [
    Script(0, 0, [5, 6, 7], [2, 5], [4]),
    Script(0, 1, [5, 6, 7], [3], []),
    Script(1, 0, [8], [1, 2, 3], [4, 6]),
]


@pytest.fixture(scope="module")
def hf_generate():
    pytest.importorskip("torch")
    from benchmarks.engines import hf_generate

    return hf_generate


@pytest.fixture(scope="module")
def torch_model(hf_generate, tmp_path_factory):
    return hf_generate.load_model(models.folder("tiny", tmp_path_factory.mktemp("m")))


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
