#!/usr/bin/env bash
# Trains on the eight GPUs of this machine.
#
#   experiments/launch/gpu_host.sh configs/qwen3b.py:gpu [--config.FIELD=VALUE ...]
#
# In a virtual environment with `pip install -e '.[cuda]'`. One process drives all the
# GPUs. Given again it goes on where the run was; Ctrl-C ends it, saving what is finished.
set -euo pipefail
config=${1:?a config file, such as configs/qwen3b.py:gpu}
shift
cd "$(dirname "$0")/../.."
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/compiled}
# What JAX takes of a GPU at once; the rest is for cuDNN and the collectives.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.92}
python -m lld_jax.main --mode=plan --config="$config" "$@"
exec python -m lld_jax.main --config="$config" "$@"
