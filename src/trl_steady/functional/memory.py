"""Memory of a micro-batch, by arithmetic. `docs/memory.md` compares it with measured runs."""

from typing import NamedTuple

RANK = 16
NF4 = 0.5 + 4 / 64  # four bits, and a float32 scale for each block of 64
ADAM = 2  # moments of an entry, in the dtype of the parameter
TOKEN_TILE, VOCAB_TILE = 4096, 32_768  # the fused head of TRL 1.16


class Model(NamedTuple):
    """Sizes in a model's config. For a mixture, `intermediate` is that of one expert."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    experts: int = 0
    chosen: int = 1
    head_dim: int = 128
    vocab: int = 151_936

    @property
    def projections(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of one decoder layer, without experts."""
        query = self.heads * self.head_dim
        key = self.kv_heads * self.head_dim
        attention = [(self.hidden, query), (self.hidden, key), (self.hidden, key), (query, self.hidden)]
        if self.experts:
            return attention
        mlp = [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return attention + mlp

    @property
    def linear(self) -> int:
        """Parameters of all linear layers except the LM head. bitsandbytes quantises these."""
        return self.layers * sum(a * b for a, b in self.projections)

    @property
    def table(self) -> int:
        """Parameters of the embedding, which are also those of the LM head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        norms = self.layers * 2 * (self.hidden + self.head_dim) + self.hidden
        experts = self.layers * self.experts * self.hidden * (3 * self.intermediate + 1)  # + 1: the router
        tables = 1 if self.tied else 2
        return self.linear + experts + norms + self.table * tables

    @property
    def adapter(self) -> int:
        """Parameters of a LoRA on `projections`: on all linear layers, or on the attention of a mixture."""
        return self.layers * RANK * sum(a + b for a, b in self.projections)


def passes(
    model: Model, mode: str, tokens: int, *, checkpointing: bool = True, on_cpu: bool = False
) -> dict[str, float]:
    """Return the bytes of a micro-batch: what is kept for backward, and the peaks of three moments on top of it."""
    full = mode == "full"
    residual = 4 if full else 2  # autocast leaves the hidden states in the dtype of the embedding
    query = model.heads * model.head_dim
    key = model.kv_heads * model.head_dim
    inner = model.chosen * model.intermediate
    routed = model.chosen * model.hidden * bool(model.experts)
    # tensors that autograd saves in one layer; the layer's input is counted as the checkpoint
    of_hidden, of_query, of_key = {"full": (22, 10, 10), "LoRA": (18, 10, 8), "QLoRA": (12, 8, 8)}[mode]
    saved = of_hidden * model.hidden + of_query * query + of_key * key
    size = 4 if full and model.experts else 2  # autocast leaves experts in the dtype of their weights
    if full or not model.experts:
        saved += size * (4 * inner + 2 * routed)
    else:
        saved += size * (3 * inner + routed)
    saved *= tokens
    gradients = tokens * (2 * size * inner + size * routed + (residual + 2) * model.hidden)
    widest = max(a * b for a, b in model.projections)
    if mode == "LoRA" and not model.experts:  # PEFT copies the inputs of a float32 adapter in float32
        gradients = tokens * (6 * inner + 10 * model.hidden)
    if mode == "QLoRA" and not model.experts:  # bitsandbytes dequantises one matrix at a time
        gradients = max(tokens * (4 * inner + 2 * model.hidden), 2 * widest + 2 * tokens * inner)
    trained = 6 * widest + 4 * model.experts * model.hidden * model.intermediate  # a gradient before it is added
    cast = 0
    layer = saved + gradients
    if full:
        cast = 2 * model.linear  # autocast keeps a bf16 copy of each trained float32 weight
        layer = saved + (cast / model.layers + max(gradients, trained))
    kept = model.layers * tokens * model.hidden * residual
    if full and model.tied:
        layer += 4 * model.table  # the gradient of the head, which waits for that of the embedding
    if not checkpointing:
        kept = kept + cast + model.layers * saved
        layer = layer - saved - cast / model.layers
        cast = 0
    rows = min(tokens, TOKEN_TILE)
    columns = min(model.vocab, VOCAB_TILE)
    tile = rows * VOCAB_TILE * 2 + 2 * columns * model.hidden
    # Triton works in the tile; without it, torch holds three float32 copies in forward, seven and a mask in backward
    forward = rows * columns * 12 * on_cpu
    backward = rows * columns * 29 * on_cpu
    head = tile + backward + tokens * model.hidden * 4
    if full:
        head += 4 * model.table
    return {"kept": kept, "end of forward": cast + tile + forward, "head backward": head, "layer backward": layer}
