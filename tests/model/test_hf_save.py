"""Exports: what `hf.save` writes, `hf.load` and transformers read."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_hf import (
    DATA,
    TINY,
    assert_trees_equal,
    expected_params,
    make_folder,
    read_tensors,
    write_config,
)

from lld_jax.model import ModelConfig, hf


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("limit", [2**30, 100_000])
def test_save_then_load_bit_for_bit(tmp_path, name, limit):
    source, folder = DATA / name, tmp_path / "deep" / "out"
    config = hf.read_config(source)
    params = hf.load(source, config)
    dtype = jnp.bfloat16 if name.endswith("bf16") else jnp.float32
    hf.save(folder, params, config, source, dtype=dtype, max_shard_bytes=limit)
    assert_trees_equal(read_tensors(folder), read_tensors(source))
    assert hf.read_config(folder) == config
    assert_trees_equal(hf.load(folder, config), params)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if limit == 2**30:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files
        sizes = {
            file: sum(t.nbytes for t in load_file(folder / file).values())
            for file in files
        }
        assert index["metadata"]["total_size"] == sum(sizes.values())
        singles = [f for f in files if len(load_file(folder / f)) == 1]
        assert len(files) > 1
        assert all(sizes[file] <= limit for file in files if file not in singles)
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_special_values_survive(tmp_path):
    config = make_folder(tmp_path / "in", tied=True)
    params = hf.load(tmp_path / "in", config)
    params["final_norm"]["scale"] = jnp.array(
        [np.nan, -np.nan, np.inf, -0.0, 1, 2, 3, 4]
    )
    hf.save(tmp_path / "out", params, config, tmp_path / "in")
    assert_trees_equal(hf.load(tmp_path / "out", config), params)


def test_saved_config_suits_old_and_new_readers(tmp_path):
    source = tmp_path / "in"
    config = make_folder(source, tied=True)
    content = json.loads((source / "config.json").read_text())
    write_config(source, content | {"eos_token_id": 7, "max_position_embeddings": 99})
    params = hf.load(source, config)
    hf.save(tmp_path / "out", params, config, source, dtype=jnp.bfloat16)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == 1e6
    assert saved["rope_parameters"]["rope_type"] == "default"
    assert saved["dtype"] == saved["torch_dtype"] == "bfloat16"
    assert saved["architectures"] == ["Qwen2ForCausalLM"]
    kept = ("eos_token_id", "max_position_embeddings", "sliding_window", "vocab_size")
    assert [saved[name] for name in kept] == [7, 99, 32768, 16]
    assert "head_dim" not in saved  # as published: it follows from the others
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 7


def test_a_source_without_a_model_is_enough(tmp_path):
    make_folder(tmp_path / "in", tied=False)
    config = ModelConfig(16, 8, 12, 2, 1, 2, 6, 1e4, 1e-5, False)
    shapes = hf.tensor_shapes(config)
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    (tmp_path / "tokenizer").mkdir()
    params = expected_params(tensors, 2)
    hf.save(tmp_path / "out", params, config, tmp_path / "tokenizer")
    assert hf.read_config(tmp_path / "out") == config  # head_dim 6, not 8 / 2
    assert_trees_equal(hf.load(tmp_path / "out", config), params)


def test_tokenizer_files_are_copied(tmp_path):
    source = tmp_path / "in"
    config = make_folder(source, tied=True)
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
    for name in (*names, "chat_template.jinja", "generation_config.json", "notes.md"):
        (source / name).write_text(f'{{"of": "{name}"}}')
    hf.save(tmp_path / "out", hf.load(source, config), config, source)
    for name in (*names, "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"of": "generation_config.json"}
    assert not (tmp_path / "out" / "notes.md").exists()


def test_a_bad_write_is_noticed_and_leaves_the_old_export(tmp_path, monkeypatch):
    source, out = tmp_path / "in", tmp_path / "out"
    config = make_folder(source, tied=True)
    params = hf.load(source, config)
    hf.save(out, params, config, source)
    before = (out / "model.safetensors").read_bytes()

    def corrupt(tensors, path, metadata):
        name = "model.layers.1.mlp.up_proj.weight"
        changed = tensors[name].copy()
        changed[0, 0] = -changed[0, 0]
        save_file(tensors | {name: changed}, path, metadata)

    monkeypatch.setattr(hf, "save_file", corrupt)
    changed = jax.tree.map(lambda x: x + 1, params)
    with pytest.raises(OSError, match="layers.1.mlp.up_proj.weight read back differs"):
        hf.save(out, changed, config, source)
    assert (out / "model.safetensors").read_bytes() == before
    monkeypatch.undo()
    hf.save(out, changed, config, source)  # replaces it, debris and all
    assert_trees_equal(hf.load(out, config), changed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_what_save_refuses(tmp_path):
    source = tmp_path / "in"
    config = make_folder(source, tied=True)
    params = hf.load(source, config)
    with pytest.raises(ValueError, match="dtype='float16'; legal"):
        hf.save(tmp_path / "out", params, config, source, dtype=jnp.float16)
    with pytest.raises(ValueError, match="is the source"):
        hf.save(source, params, config, source)
    with pytest.raises(ValueError, match="head has shape .16, 8., expected None"):
        hf.save(
            tmp_path / "out", params | {"head": params["embedding"]}, config, source
        )
    short = params | {"embedding": params["embedding"][:15]}
    with pytest.raises(ValueError, match=r"embedding has shape \(15, 8\), expected"):
        hf.save(tmp_path / "out", short, config, source)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="not a model"):
        hf.save(tmp_path / "other", params, config, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "other"]


@pytest.mark.parametrize("name", TINY)
def test_transformers_reads_the_export(tmp_path, name):
    torch = pytest.importorskip("torch")
    from transformers import Qwen2ForCausalLM

    source = DATA / name
    config = hf.read_config(source)
    params = hf.load(source, config)
    dtype = jnp.bfloat16 if name.endswith("bf16") else jnp.float32
    hf.save(tmp_path, params, config, source, dtype=dtype, max_shard_bytes=200_000)

    ids = torch.arange(2 * 12).reshape(2, 12) * 7 % config.vocab
    logits, states = [], []
    for folder in (source, tmp_path):
        model, report = Qwen2ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
        assert model.config.rope_parameters["rope_theta"] == config.rope_theta
        with torch.no_grad():
            logits.append(model(ids).logits.numpy())
        states.append({k: v.numpy() for k, v in model.state_dict().items()})
    np.testing.assert_array_equal(logits[0], logits[1])
    if config.tied:
        states = [{k: v for k, v in s.items() if k != "lm_head.weight"} for s in states]
    assert_trees_equal(params, expected_params(states[0], config.layers))
