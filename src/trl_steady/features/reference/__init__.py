"""The KL reference, an adapter or a full copy of the model: its tensors, refreshes, saving and restoring."""
