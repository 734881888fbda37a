import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.models.utils import disable_gradient_checkpointing

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
ids = torch.arange(16)[None]
for options in ({"every_n_layers": 2}, {"every_n_layers": 2, "use_reentrant": False}, {"offload": True}):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=100)).train()
    of_torch = {name: value for name, value in options.items() if name == "use_reentrant"}
    own = {name: value for name, value in options.items() if name != "use_reentrant"}
    model.gradient_checkpointing_enable(of_torch or None, **own)  # transformers' Trainer
    for when in ("before", "after"):
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        found = f"recomputes {sum(layer.gradient_checkpointing for layer in layers)} of {len(layers)} layers"
        try:
            model(ids).logits.sum().backward()
        except (RuntimeError, ValueError) as error:
            found = str(error)
        print(f"{options}, {when} a rollout: {found}")
        with torch.no_grad(), disable_gradient_checkpointing(model, options):  # GRPOTrainer, in each rollout
            model(ids)
