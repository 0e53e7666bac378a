"""LLDS for GRPO in agent search, Qwen2.5-3B-Instruct, on 16 chips.

Paper: arXiv 2512.04220; the values are those of the authors' run (`common.py`).
Command, on each of four hosts of four chips (`experiments/launch/`):
python -m lld_jax.main --config=configs/qwen3b_instruct.py --workdir=DIR --distributed
Plain GRPO: --config=configs/qwen3b_instruct.py:llds=0. Others: gate=response,
policy=gspo, answer=paper, micro=32. One host of eight GPUs: :gpu.
In small, on 8 devices of any kind: --config=configs/qwen3b_instruct.py:smoke

Data: `data/` holds the questions and the index that `common.py` names.
Memory of a v5e chip (`--mode=plan --device=v5e`): 6.6 GiB in training with a row of
4,096 tokens a chip, 9.9 while sampling with 512 slots; 15.75 are there.
Expected (paper): mean exact match of seven sets .441, against .336 for plain GRPO; GSPO
(`policy=gspo`) .451 with LLDS, .331 without. With LLDS, NQ .462, TriviaQA .627, PopQA
.468, HotpotQA .443, 2WikiMultiHopQA .447, MuSiQue .197, Bamboogle .444.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arg: str = "") -> ConfigDict:
    return common.qwen("Qwen/Qwen2.5-3B-Instruct", tensor=2, arg=arg)
