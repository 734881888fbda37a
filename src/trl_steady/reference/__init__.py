"""The KL reference as tensors: what it is (an adapter, or a full copy), how it moves, how it is saved and restored."""
