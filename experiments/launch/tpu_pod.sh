#!/usr/bin/env bash
# Trains on every worker of a TPU pod slice.
#
#   TPU=my-v5e-16 ZONE=us-west4-a BUCKET=my-bucket \
#     experiments/launch/tpu_pod.sh configs/qwen3b.py [--config.FIELD=VALUE ...]
#
# Sends this commit to the workers, installs it and starts the same command on each; JAX
# finds the others by itself. The run is kept in gs://$BUCKET/runs/NAME, which the
# machines' account has to be allowed to write; output goes to ~/lld_jax/train.log of a
# worker. Given again it goes on where the run was; `STOP=1` ends it, saving what is
# finished. gs://$BUCKET/data holds the questions and the index that the config names;
# it is mounted at ~/bucket.
set -euo pipefail
: "${TPU:?name of the TPU}" "${ZONE:?its zone}" "${BUCKET:?a bucket of its region}"
config=${1:?a config file, such as configs/qwen3b.py}
shift
cd "$(dirname "$0")/../.."
name=$(basename "${config%%:*}" .py)

on_all() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

if [[ ${STOP:-} ]]; then
  on_all 'pkill -TERM -f lld_jax.main'
  exit
fi
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
git archive --format=tar.gz --output="$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$TPU":lld_jax.tar.gz --zone="$ZONE" \
  --worker=all
on_all "set -e
mkdir -p lld_jax bucket && tar -xzf lld_jax.tar.gz -C lld_jax
mountpoint -q bucket || gcsfuse --implicit-dirs $(printf %q "$BUCKET") bucket
cd lld_jax
python3 -m venv .venv && .venv/bin/pip install --quiet -e '.[tpu,gcs]'"
flags=$(printf ' %q' --config="$config" --config.data_dir=../bucket/data "$@")
# Compiled programs are kept: after a preemption the first step starts at once.
on_all "cd lld_jax
JAX_COMPILATION_CACHE_DIR=\$HOME/compiled nohup .venv/bin/python -m lld_jax.main \
--distributed --workdir=$(printf %q "gs://$BUCKET/runs/${RUN:-$name}")$flags >> train.log 2>&1 &
sleep 20; tail -n 3 train.log"
