import torch
from trl.trainer.utils import nanstd

for reward in (0.1, 0.5, 0.7, 0.9):
    rewards = torch.full((8,), reward)
    std = nanstd(rewards)
    advantages = (rewards - rewards.nanmean()) / (std + 1e-4)  # as GRPOTrainer does
    is_std_zero = torch.isclose(std, torch.zeros(())).item()
    print(f"8 times {reward}: advantage {advantages[0]:.1e}, is_std_zero {is_std_zero}")
