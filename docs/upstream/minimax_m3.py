import torch
from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

torch.manual_seed(0)
sizes = dict.fromkeys(("hidden_size", "intermediate_size", "dense_intermediate_size", "shared_intermediate_size"), 32)
heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, rotary_dim=8, index_n_heads=2, index_head_dim=8)
blocks = dict(layer_types=["minimax_m3_sparse"] * 2, index_block_size=4, index_topk_blocks=3)
config = MiniMaxM3VLTextConfig(
    vocab_size=100, num_hidden_layers=2, num_local_experts=4, initializer_range=0.3, **sizes, **heads, **blocks
)
model = MiniMaxM3VLForCausalLM(config).eval()
ids = torch.randint(1, 100, (1, 32))


@torch.no_grad()
def log_probs(left, right):
    mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
    logits = model(torch.nn.functional.pad(ids, (left, right)), attention_mask=mask).logits
    return logits[:, left : left + ids.size(1)].log_softmax(-1)


for left in (0, 8):
    apart = (log_probs(left, 8) - log_probs(left, 0)).abs().max()
    print(f"{left} columns at the left: 8 more at the right change log-probs by up to {apart:.1g}")
