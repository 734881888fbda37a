import os

import torch

if not torch.cuda.device_count():  # `is_available` would read CUDA_VISIBLE_DEVICES for good
    # Triton reads this when TRL is imported: where there is no GPU, its interpreter computes TRL's kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import trl_steady  # noqa: F401, first, so that its filter of bitsandbytes' log is there
