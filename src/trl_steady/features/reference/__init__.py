"""The KL reference, which is an adapter or a full copy of the model: its tensors, its moves, saving and restoring."""
