"""Pretrain a GPT: parse -> build -> train.

torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size 256 ... (flags: docs/flags.md)
"""

from megatron.train.main import main

if __name__ == "__main__":
    main()
