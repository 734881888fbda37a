import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

ids = torch.tensor([[5, 6, 7, 8]])
for config in (
    LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False),
    IA3Config(target_modules=["q_proj"], feedforward_modules=[], init_ia3_weights=False),
    LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=100, initializer_range=0.3))
    model = get_peft_model(model, config)
    given = model(ids).logits.detach()
    # GRPOTrainer.__init__ of TRL 1.16.0, with beta above 0 and a PeftModel
    model.add_adapter("ref", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if ".default." in name:
            model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
    off = []
    for adapter in ("default", "ref"):
        model.set_adapter(adapter)
        off.append((model(ids).logits - given).abs().max().item())
    print(f"{type(config).__name__} {config.target_modules}: policy off by {off[0]:.2g}, reference by {off[1]:.2g}")
