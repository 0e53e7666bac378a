"""LLDS for GRPO in agent search, Qwen2.5-7B-Instruct, on 16 chips.

Paper: arXiv 2512.04220; the values are those of the authors' run (`common.py`).
Command, on each of four hosts of four chips (`experiments/launch/`):
python -m lld_jax.main --config=configs/qwen7b_instruct.py --workdir=DIR --distributed
Plain GRPO: --config=configs/qwen7b_instruct.py:llds=0. Others: gate=response,
policy=gspo, answer=paper, micro=32. One host of eight GPUs: :gpu.
In small, on 8 devices of any kind: --config=configs/qwen7b_instruct.py:smoke

Data: `data/` holds the questions and the index that `common.py` names.
Memory of a v5e chip (`--mode=plan --device=v5e`): 14.3 GiB in training with a row of
4,096 tokens a chip, 15.0 while sampling with 384 slots; 15.75 are there.
Expected (paper): mean exact match of seven sets .483, against .396 for plain GRPO. With
LLDS, NQ .518, TriviaQA .676, PopQA .486, HotpotQA .492, 2WikiMultiHopQA .490, MuSiQue
.228, Bamboogle .492. Lambda is .3 here.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(arg: str = "") -> ConfigDict:
    config = common.qwen("Qwen/Qwen2.5-7B-Instruct", tensor=4, coef=0.3)
    config.rollout.slots = 384  # what fits beside the weights on a v5e chip
    return common.apply_arg(config, arg)
