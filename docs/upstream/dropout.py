import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config
from trl.trainer.utils import use_adapter

ids = torch.randint(0, 100, (8, 16), generator=torch.Generator().manual_seed(0))


def log_probs(model):
    with torch.no_grad():
        logps = model(ids).logits[:, :-1].log_softmax(-1)
    return logps.gather(-1, ids[:, 1:, None]).squeeze(-1)


for name, is_loaded, base_dropout in (("loaded adapter", True, 0.0), ("new adapter", False, 0.1)):
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), base_dropout)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, initializer_range=0.1, **ends, **rates)
    lora = LoraConfig(
        target_modules=["c_attn"], lora_dropout=0.1, init_lora_weights=not is_loaded, fan_in_fan_out=True
    )
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    if is_loaded:  # GRPOTrainer.__init__ of TRL 1.16.0, with beta above 0 and a PeftModel
        model.add_adapter("ref", lora)
        for key, parameter in model.named_parameters():
            if ".default." in key:
                model.get_parameter(key.replace(".default.", ".ref.")).data.copy_(parameter.data)
    model.train()  # transformers' Trainer does this
    with use_adapter(model, "ref" if is_loaded else None):  # GRPOTrainer._generate_and_score_completions
        drawn = log_probs(model)
        reference = log_probs(model.eval())
    off = (drawn - reference).abs()
    print(f"{name}: log-probs of the reference are off by {off.mean():.2g} nats, and by up to {off.max():.2g}")
