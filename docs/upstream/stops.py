import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = {f"w{i}": i for i in range(98)} | {"<eos>": 98, "<pad>": 99}
core = Tokenizer(models.WordLevel(words, unk_token="w0"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", padding_side="left")
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, eos_token_id=98, pad_token_id=99, **sizes))
model.generation_config.eos_token_id = 98


class Watched(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        samples = super()._generate_and_score_completions(inputs)
        trained = samples["completion_ids"][samples["completion_mask"].bool()]
        print(f"{(trained == 99).sum() / len(trained):.0%} of the tokens in the loss are padding")
        return samples


args = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=32,
    num_generations=32,
    max_completion_length=32,
    max_steps=1,
    generation_kwargs={"eos_token_id": [98, *range(10)]},
    use_cpu=True,
    bf16=False,
    report_to="none",
    disable_tqdm=True,
    seed=0,
)
data = Dataset.from_dict({"prompt": ["w20 w21 w22"] * 32})
reward = lambda completions, **_: [float(len(completion)) for completion in completions]
Watched(model, reward, args, train_dataset=data, processing_class=tokenizer).train()
