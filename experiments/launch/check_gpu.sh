#!/usr/bin/env bash
# Checks a GPU machine end to end in ten minutes: says what failed, or that all is well.
#
#   experiments/launch/check_gpu.sh [NUMBER_OF_GPUS]
#
# In a virtual environment with `pip install -e '.[cuda,test]'`. JAX sees the GPUs; cuDNN
# attention gives what the blocked form gives; the big config runs two steps in small;
# tiny learns on one GPU; a run that is killed goes on.
set -euo pipefail
cd "$(dirname "$0")/../.."
gpus=${1:-8}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
step() { printf '\n--- %s\n' "$1"; }

step "JAX sees $gpus GPUs"
python - "$gpus" <<'PYTHON'
import sys

import jax

devices = jax.devices()
print(*devices)
assert devices[0].platform == "gpu", "no GPU: is jax[cuda] installed?"
assert len(devices) == int(sys.argv[1]), f"{len(devices)} devices"
PYTHON

step "attention: cuDNN against the blocked form"
python -m experiments.launch.compare_attention

step "the big config in small, two steps on $gpus GPUs"
if ((gpus % 2)); then split=(fsdp="$gpus" tensor=1); else split=(fsdp=$((gpus / 2)) tensor=2); fi
python -m lld_jax.main --workdir="$folder/smoke" --config.data_dir="$folder/data" \
  --config="configs/qwen3b.py:smoke,${split[0]},${split[1]},micro=$gpus,updates=1"

step "tiny learns on one GPU, and goes on after it was killed"
run=(env CUDA_VISIBLE_DEVICES=0 python -m lld_jax.main --config=configs/tiny.py
  --workdir="$folder/tiny" --config.data_dir="$folder/data" --config.checkpoint.every=5)
"${run[@]}" & process=$!
until [[ $(wc -l 2>/dev/null <"$folder/tiny/metrics.jsonl" || echo 0) -ge 8 ]]; do
  kill -0 "$process" || exit 1
  sleep 1
done
kill -KILL "$process"
wait "$process" || true
"${run[@]}"
python - "$folder/tiny" <<'PYTHON'
import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
assert [x["step"] for x in lines] == list(range(41)), "a step is missing or twice there"
scores = json.loads((folder / "summary.json").read_text())["exact_match"]["greedy"]
print("greedy exact match", scores)
assert scores["after"] > 0.45 > scores["before"], "tiny did not learn"
PYTHON
printf '\nall is well\n'
