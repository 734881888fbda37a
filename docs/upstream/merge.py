import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
layer = model.base_model.model.model.layers[0].mlp.up_proj
before = layer.base_layer.weight.detach().clone()
for push in range(1, 101):
    with torch.no_grad():  # an update of the adapter
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(1e-4 * torch.randn_like(parameter))
    model.merge_adapter()  # before the weights are sent
    model.unmerge_adapter()  # after it
    if push in (1, 10, 100):
        moved = layer.base_layer.weight.detach().float() - before.float()
        share, delta = (moved != 0).float().mean(), layer.get_delta_weight("default").float()
        print(f"{push} pushes: {share:.1%} of the weights changed, by {moved.norm() / delta.norm():.0%} of the delta")
