"""Hugging Face folders: configs in two layouts, weights in and out, bit for bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import environment
from paths import DATA
from safetensors.numpy import load_file, save_file

from lld_jax.model import ModelConfig, hf

TINY = ("qwen2_tiny_a", "qwen2_tiny_b", "qwen2_tiny_a_bf16")
TREE = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def published(**fields) -> dict:
    """A config.json in the layout of the published Qwen2.5 files (0.5B by default)."""
    return {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "max_window_layers": 24,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    } | fields


def write_config(folder: Path, content: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def expected_params(tensors: dict[str, np.ndarray], layers: int) -> dict:
    """The parameter tree, written out by hand from the file's names."""
    tree = {}
    for ours, theirs in TREE.items():
        for kind in ("weight", "bias"):
            names = [f"model.layers.{i}.{theirs}.{kind}" for i in range(layers)]
            if names[0] in tensors:
                stack = np.stack([tensors[name].astype(np.float32) for name in names])
                if stack.ndim == 3:
                    tree.setdefault(ours, {})["kernel"] = stack.swapaxes(1, 2)
                else:
                    name = "scale" if kind == "weight" else "bias"
                    tree.setdefault(ours, {})[name] = stack
    params = {
        "embedding": tensors["model.embed_tokens.weight"].astype(np.float32),
        "final_norm": {"scale": tensors["model.norm.weight"].astype(np.float32)},
        "layers": tree,
    }
    if "lm_head.weight" in tensors:
        params["head"] = tensors["lm_head.weight"].astype(np.float32)
    return params


def assert_trees_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("fields", "sizes", "parameters"),
    [  # published sizes, and the published parameter counts of the files
        ({}, (24, 2, 7, 64, True), 494_032_768),
        (
            dict(
                hidden_size=2048,
                intermediate_size=11008,
                num_hidden_layers=36,
                num_attention_heads=16,
            ),
            (36, 2, 8, 128, True),
            3_085_938_688,
        ),
        (
            dict(
                hidden_size=3584,
                intermediate_size=18944,
                num_hidden_layers=28,
                num_attention_heads=28,
                num_key_value_heads=4,
                tie_word_embeddings=False,
                vocab_size=152064,
            ),
            (28, 4, 7, 128, False),
            7_615_616_512,
        ),
    ],
    ids=["0.5B", "3B", "7B"],
)
def test_every_qwen25_size(tmp_path, fields, sizes, parameters):
    config = hf.read_config(write_config(tmp_path, published(**fields)))
    found = (config.layers, config.kv_heads, config.group, config.head_dim, config.tied)
    assert found == sizes
    assert (config.rope_theta, config.rms_eps) == (1e6, 1e-6)
    shapes = hf.tensor_shapes(config)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == parameters
    assert len(shapes) == 12 * config.layers + (2 if config.tied else 3)


@pytest.mark.parametrize("name", TINY[:2])
def test_both_config_layouts(tmp_path, name):
    config = hf.read_config(DATA / name)
    shutil.copy(DATA / name / "config_legacy.json", tmp_path / "config.json")
    assert hf.read_config(tmp_path) == config
    if name == "qwen2_tiny_a":
        assert config == ModelConfig(512, 64, 128, 2, 2, 2, 16, 1e6, 1e-6, True)
    else:
        assert config == ModelConfig(640, 96, 160, 3, 2, 3, 16, 1e4, 1e-6, False)


def test_head_dim_of_its_own(tmp_path):
    config = hf.read_config(write_config(tmp_path, published(head_dim=32)))
    assert config.head_dim == 32
    shape = hf.tensor_shapes(config)["model.layers.0.self_attn.q_proj.weight"]
    assert shape == (14 * 32, 896)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rope_theta": "1e6"}, "rope_theta='1e6'; legal: a positive number"),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            r"rope_theta and rope_parameters.rope_theta=\[1000000.0, 10000.0\]",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.rope_type='yarn'; legal: 'default'",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type='yarn'"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"model_type": "llama"}, "model_type='llama'; legal: 'qwen2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; legal: 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True; legal: false"),
        ({"layer_types": ["sliding_attention"]}, "layer_types=.*full_attention"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4; legal: a divisor"),
        ({"hidden_size": 900}, "num_attention_heads=14; legal: a divisor .*=900"),
        ({"hidden_size": 14 * 3}, "head_dim=3; legal: an even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0; legal: a positive integer"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None; legal: true or"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None; legal: a positive number"),
    ],
)
def test_configs_that_are_refused(tmp_path, fields, match):
    with pytest.raises(ValueError, match=match):
        hf.read_config(write_config(tmp_path, published(**fields)))


def test_missing_rotary_base_is_never_filled_in(tmp_path):
    content = published()
    del content["rope_theta"]
    for rope in ({}, {"rope_parameters": {"rope_type": "default"}}):
        with pytest.raises(ValueError, match="rope_theta=None; legal"):
            hf.read_config(write_config(tmp_path, content | rope))
    with pytest.raises(FileNotFoundError, match="config.json"):
        hf.read_config(tmp_path / "nowhere")


def test_resolve(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repo, allow_patterns):
        asked.append((repo, "*.safetensors" in allow_patterns))
        if repo == "Qwen/none":
            raise huggingface_hub.errors.LocalEntryNotFoundError("offline")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hf.resolve(str(tmp_path)) == tmp_path
    assert asked == []
    assert hf.resolve("Qwen/Qwen2.5-3B") == tmp_path
    assert asked == [("Qwen/Qwen2.5-3B", True)]
    with pytest.raises(FileNotFoundError, match="model.path='Qwen/none'.*offline"):
        hf.resolve("Qwen/none")
    for path in ("/no/such/folder", "./a/b", "nothing"):
        with pytest.raises(FileNotFoundError, match="model.path=.* is no folder"):
            hf.resolve(path)
    assert len(asked) == 2


# ------------------------------------------------------------------------ loading


@pytest.mark.parametrize("name", TINY)
def test_load_is_the_file_transposed_and_stacked(name):
    config = hf.read_config(DATA / name)
    params = hf.load(DATA / name, config)
    tensors = read_tensors(DATA / name)
    assert_trees_equal(params, expected_params(tensors, config.layers))
    assert params["layers"]["gate"]["kernel"].shape == (
        config.layers,
        config.width,
        config.mlp,
    )


def test_load_in_bfloat16():
    config = hf.read_config(DATA / "qwen2_tiny_a_bf16")
    stored = hf.load(DATA / "qwen2_tiny_a_bf16", config, dtype=jnp.bfloat16)
    rounded = hf.load(DATA / "qwen2_tiny_a", config, dtype=jnp.bfloat16)
    assert_trees_equal(stored, rounded)  # the bf16 folder holds a's rounded weights
    assert stored["embedding"].dtype == jnp.bfloat16


def make_folder(folder: Path, tied: bool, **changes) -> ModelConfig:
    """2 layers, width 8, vocabulary 16; `changes` sets tensors, None removes one."""
    content = published(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        tie_word_embeddings=tied,
    )
    config = hf.read_config(write_config(folder, content))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in hf.tensor_shapes(config).items()
    } | changes
    tensors = {name: array for name, array in tensors.items() if array is not None}
    save_file(tensors, folder / "model.safetensors")
    return config


def test_tied_without_a_head(tmp_path):
    params = hf.load(tmp_path, make_folder(tmp_path, tied=True))
    assert "head" not in params
    assert params["embedding"].shape == (16, 8)


@pytest.mark.filterwarnings("error")
def test_tied_with_a_stray_head(tmp_path):
    stray = {"lm_head.weight": np.ones((16, 8), np.float32)}
    config = make_folder(tmp_path, tied=True, **stray)
    with pytest.warns(UserWarning, match="lm_head.weight is ignored"):
        params = hf.load(tmp_path, config)
    assert "head" not in params


def test_untied_without_a_head(tmp_path):
    config = make_folder(tmp_path, tied=False, **{"lm_head.weight": None})
    with pytest.raises(ValueError, match="missing .*lm_head.weight.*tie_word_embed"):
        hf.load(tmp_path, config)


@pytest.mark.parametrize("tied", [True, False])
def test_all_missing_tensors_are_named(tmp_path, tied):
    names = ["model.layers.1.self_attn.k_proj.bias", "model.norm.weight"]
    config = make_folder(tmp_path, tied, **dict.fromkeys(names))
    with pytest.raises(ValueError) as error:
        hf.load(tmp_path, config)
    assert all(name in str(error.value) for name in names)
    assert "k_proj.weight" not in str(error.value)


def test_unused_tensors(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    hf.load(tmp_path, make_folder(tmp_path, tied=False, **buffer))
    bias = {"model.layers.0.self_attn.o_proj.bias": np.ones(8, np.float32)}
    config = make_folder(tmp_path, tied=False, **bias)
    with pytest.raises(ValueError, match=r"unused tensors \['model.layers.0.*o_proj"):
        hf.load(tmp_path, config)


def test_a_complete_untied_file_has_27_tensors(tmp_path):
    shapes = hf.tensor_shapes(make_folder(tmp_path, tied=False))
    assert len(shapes) == 27
    biases = [name for name in shapes if name.endswith(".bias")]
    assert len(biases) == 6 and not any("o_proj" in name for name in biases)


def test_shape_and_type_mismatch(tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    config = make_folder(tmp_path, True, **{name: np.ones((12, 8), np.float32)})
    match = rf"{name} has shape \(12, 8\), expected \(8, 12\)"
    with pytest.raises(ValueError, match=match):
        hf.load(tmp_path, config)
    config = make_folder(tmp_path, True, **{name: np.ones((8, 12), np.int8)})
    with pytest.raises(ValueError, match=f"{name} is I8; legal"):
        hf.load(tmp_path, config)


def test_folders_without_weights(tmp_path):
    config = hf.read_config(DATA / "qwen2_tiny_b")
    with pytest.raises(FileNotFoundError, match="no weights"):
        hf.load(tmp_path, config)
    shutil.copytree(DATA / "qwen2_tiny_b", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00004.safetensors"):
        hf.load(tmp_path, config)


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from lld_jax.model import hf, tensors

assert jax.device_count() == 8
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"),
                     axis_types=(jax.sharding.AxisType.Auto,) * 3)
folder, out = sys.argv[1:]
config = hf.read_config(folder)
whole = hf.load(folder, config)

def spec(path, array):
    if path[-1].key == "kernel":
        return NamedSharding(mesh, P(None, "fsdp", "tensor"))
    if path[-1].key in ("embedding", "head"):
        return NamedSharding(mesh, P(("data", "fsdp", "tensor"), None))
    return NamedSharding(mesh, P(None))

shardings = jax.tree_util.tree_map_with_path(spec, whole)

# Counts the elements that are read of each tensor.
counts = {}
class Counting:
    def __init__(self, name, inner):
        self.name, self.inner = name, inner
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype
    def __getitem__(self, index):
        block = self.inner[index]
        counts[self.name] = counts.get(self.name, 0) + block.size
        return block
original = tensors.open_slices
tensors.open_slices = lambda *args: {
    k: Counting(k, v) for k, v in original(*args).items()
}
params = hf.load(folder, config, shardings)
sizes = {k: int(np.prod(s)) for k, s in hf.tensor_shapes(config).items()}
assert counts == sizes, "every element is read once, replicas included"
tensors.open_slices = original

for (path, a), b, s in zip(jax.tree_util.tree_leaves_with_path(params),
                           jax.tree.leaves(whole), jax.tree.leaves(shardings)):
    assert a.sharding == s, path
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
    for shard in a.addressable_shards:
        assert np.array_equal(shard.data, np.asarray(b)[shard.index]), path
hf.save(out, params, config, folder)
print("equal")
"""


def test_load_and_save_on_eight_devices(tmp_path):
    source = DATA / "qwen2_tiny_b"
    command = [sys.executable, "-c", SHARDED, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment(8), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr
    assert_trees_equal(read_tensors(tmp_path / "out"), read_tensors(source))
