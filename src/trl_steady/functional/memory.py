"""Memory of a micro-batch, by arithmetic. `docs/memory.md` compares it with measured runs."""

import math
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
    norms: int = 2
    """Norms of hidden states in a decoder layer. Gemma has four."""
    head_norms: bool = True
    """True if queries and keys have norms."""
    activation: int = 3
    """Tensors of the inner size that the activation of an MLP keeps. That of gpt-oss keeps six."""
    expert_biases: bool = False

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
        norms = self.layers * (self.norms * self.hidden + 2 * self.head_dim * self.head_norms) + self.hidden
        experts = self.layers * self.experts * self.hidden * (3 * self.intermediate + 1)  # + 1: the router
        tables = 1 if self.tied else 2
        return self.linear + experts + norms + self.table * tables

    @property
    def adapter(self) -> int:
        """Parameters of a LoRA on `projections`: on all linear layers, or on the attention of a mixture."""
        return self.layers * RANK * sum(a + b for a, b in self.projections)


def passes(
    model: Model,
    mode: str,
    tokens: int,
    *,
    checkpointing: bool = True,
    every_n_layers: int = 1,
    offload: bool = False,
    on_cpu: bool = False,
    copies_head: bool | None = None,
    critic: bool = False,
) -> dict[str, float]:
    """Return the bytes of a micro-batch: what is kept for backward, and the peaks of three moments on top of it.

    Args:
        model: The sizes.
        mode: "full" (float32 under autocast), "LoRA" (a float32 adapter on a bf16 base) or "QLoRA".
        tokens: Those of all sequences together.
        checkpointing: True if backward computes layers again.
        every_n_layers: With checkpointing, backward computes the first of each group of so many layers again.
        offload: With checkpointing, the inputs of these layers wait for backward in another memory.
        on_cpu: True if the LM head runs without Triton.
        copies_head: True if TRL multiplies with a float32 copy of the head, as on CPU and with torch below 2.8. None:
            as `on_cpu`.
        critic: True for the passes of a critic. It has no LM head. With "full" it computes in float32 throughout,
            and its adapter's inputs are not copied.
    """
    full = mode == "full"
    wide = full and critic
    copies_inputs = mode == "LoRA" and not critic  # PEFT copies the inputs of a float32 adapter in float32
    residual = _residual(mode)
    query = model.heads * model.head_dim
    key = model.kv_heads * model.head_dim
    inner = model.chosen * model.intermediate
    routed = model.chosen * model.hidden * bool(model.experts)
    saved = tokens * _saved_for_attention(model, query, key, full=full, wide=wide, copies_inputs=copies_inputs)
    size = 2
    if wide or (full and model.experts):  # autocast leaves experts in the dtype of their weights
        size = 4
    keeps_inputs = full or not model.experts  # of the linear layers of an MLP, which need them for a gradient
    saved += tokens * size * (model.activation * inner + routed + keeps_inputs * (inner + routed))
    # of the experts' inner states or of their outputs, whichever are more
    experts = max(2 * inner + routed, 3 * routed) + 2 * routed * model.expert_biases
    gradients = tokens * (size * experts + (residual + 2) * model.hidden)
    widest = max(a * b for a, b in model.projections)
    if not full and not model.experts:
        gradients = tokens * (4 * inner + 2 * model.hidden)
    if copies_inputs and not model.experts:
        gradients = tokens * (6 * inner + 10 * model.hidden)
    if mode == "QLoRA" and not model.experts:  # bitsandbytes dequantises one matrix at a time
        gradients = max(gradients, 2 * widest + 2 * tokens * inner)
    if model.norms > 2:  # the norm after an MLP has five float32 tensors in backward, while all of the MLP is saved
        gradients = max(gradients, 24 * tokens * model.hidden)
    # a gradient before it is added, and its bf16 form under autocast
    trained = (4 if wide else 6) * widest + 4 * model.experts * model.hidden * model.intermediate
    cast = 0
    layer = saved + gradients
    if full:
        cast = 0 if wide else 2 * model.linear  # autocast keeps a bf16 copy of each trained float32 weight
        layer = saved + (cast / model.layers + max(gradients, trained))
    if full and model.tied and not critic:
        layer += 4 * model.table  # the gradient of the head, which waits for that of the embedding
    of_input = tokens * model.hidden * residual
    of_whole = saved + cast / model.layers  # beside its input, of a layer that backward does not compute again
    again = 0
    if checkpointing:
        again = math.ceil(model.layers / every_n_layers)
    kept = model.layers * of_input + (model.layers - again) * of_whole
    if checkpointing and offload:
        kept -= again * of_input
        if not full:  # the first one is the output of a frozen embedding: a leaf of the graph, which stays
            kept += of_input
    # the last layer decides the peak: its backward comes first, when all others are still kept
    if not checkpointing or (model.layers - 1) % every_n_layers:
        layer -= of_whole
    elif offload:
        layer += of_input
    cast *= again / model.layers
    end, head = _of_head(
        model, tokens, full=full, on_cpu=on_cpu, copies=on_cpu if copies_head is None else copies_head
    )
    if critic:
        end = 4 * tokens * model.hidden  # the head's input in float32
        head = 3 * end
    return {"kept": kept, "end of forward": cast + end, "head backward": head, "layer backward": layer}


def on_host(model: Model, mode: str, tokens: int, *, every_n_layers: int = 1) -> int:
    """Return the bytes that `offload` keeps in the host's memory until backward. The arguments are those of `passes`.

    They are the inputs of the layers that backward computes again.
    """
    return math.ceil(model.layers / every_n_layers) * tokens * model.hidden * _residual(mode)


def _residual(mode: str) -> int:
    """Return the bytes of an entry of a hidden state. Autocast leaves it in the dtype of the embedding."""
    if mode == "full":
        return 4
    return 2


def _saved_for_attention(model: Model, query: int, key: int, *, full: bool, wide: bool, copies_inputs: bool) -> int:
    """Return the bytes that autograd saves for a token in one layer, without its MLP and without the layer's input.

    `query` and `key` are the sizes of all queries and of all keys of a token.
    """
    more_norms = model.norms - 2
    inputs, projections = 2, 5  # inputs of projections: of queries, keys and values, and of gate and up
    if model.experts:
        inputs, projections = 1, 3
    if wide:
        return (20 + 8 * more_norms) * model.hidden + (8 + 8 * model.head_norms) * (query + key)
    if full:  # autocast casts the input of each projection, and of a router
        casts = projections + bool(model.experts)
        return (12 + 2 * casts + 8 * more_norms) * model.hidden + (4 + 6 * model.head_norms) * (query + key)
    of_hidden = 8 + 2 * inputs + 4 * more_norms
    of_query = 4 + 4 * model.head_norms
    of_key = of_query
    if copies_inputs:  # autocast casts each copy back
        of_hidden += 2 * (projections - inputs)
        of_query += 2
    return of_hidden * model.hidden + of_query * query + of_key * key


def _of_head(model: Model, tokens: int, *, full: bool, on_cpu: bool, copies: bool) -> tuple[float, float]:
    """Return the peaks of TRL's fused LM head in forward and in backward."""
    rows = min(tokens, TOKEN_TILE)
    columns = min(model.vocab, VOCAB_TILE)
    tile = 2 * rows * VOCAB_TILE
    if full:
        tile += 2 * columns * model.hidden  # the head's weights in bf16
    # Triton works in the tile; without it, torch holds three float32 copies in forward, seven and a mask in backward
    forward = 12 * rows * columns * on_cpu
    backward = 29 * rows * columns * on_cpu
    if copies:
        backward = max(backward, 4 * rows * columns + 4 * columns * model.hidden)
    backward += tile + 4 * tokens * model.hidden
    if full:
        backward += 4 * model.table
    return tile + forward, backward
