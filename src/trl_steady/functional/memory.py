"""Memory of a micro-batch, by arithmetic. `docs/memory.md` compares it with measured runs."""

import math
from dataclasses import dataclass
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
        critic: True for the passes of a critic. It has no LM head, and its adapter's inputs are not copied.
    """
    if copies_head is None:
        copies_head = on_cpu
    run = _Pass(model, mode, tokens, critic)
    cast = run.cast_weights
    whole = run.saved + cast / model.layers  # beside its input, of a layer that backward does not compute again
    again = 0
    if checkpointing:
        again = math.ceil(model.layers / every_n_layers)
    kept = model.layers * run.layer_input + (model.layers - again) * whole
    if checkpointing and offload:
        kept -= again * run.layer_input
        if not run.full:  # the first one is the output of a frozen embedding: a leaf of the graph, which stays
            kept += run.layer_input
    layer = run.layer_backward
    # the last layer decides the peak: its backward comes first, when all others are still kept
    if not checkpointing or (model.layers - 1) % every_n_layers:
        layer -= whole
    elif offload:
        layer += run.layer_input
    cast *= again / model.layers
    if critic:
        end = 4 * tokens * model.hidden  # the head's input in float32
        head = 3 * end
    else:
        end, head = _of_head(model, tokens, full=run.full, on_cpu=on_cpu, copies=copies_head)
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


@dataclass(frozen=True)
class _Pass:
    """Bytes of one layer in a forward and a backward pass of the policy, or of a critic."""

    model: Model
    mode: str
    tokens: int
    critic: bool

    @property
    def full(self) -> bool:
        """True if all weights are trained."""
        return self.mode == "full"

    @property
    def copies_inputs(self) -> bool:
        """True if PEFT copies the inputs of a float32 adapter in float32."""
        return self.mode == "LoRA" and not self.critic

    @property
    def inner(self) -> int:
        """Entries of the inner states of an MLP for a token, or of all experts that it chooses."""
        return self.model.chosen * self.model.intermediate

    @property
    def routed(self) -> int:
        """Entries of the hidden states that go to a token's experts; 0 for a dense model."""
        if not self.model.experts:
            return 0
        return self.model.chosen * self.model.hidden

    @property
    def mlp_entry(self) -> int:
        """Bytes of an entry of an MLP's states. Autocast leaves experts in the dtype of their weights."""
        if self.full and self.model.experts:
            return 4
        return 2

    @property
    def layer_input(self) -> int:
        """The input of a layer."""
        return self.tokens * self.model.hidden * _residual(self.mode)

    @property
    def cast_weights(self) -> int:
        """The bf16 copies of the trained float32 weights of all layers, which autocast keeps."""
        if self.full:
            return 2 * self.model.linear
        return 0

    @property
    def saved(self) -> int:
        """Autograd saves these bytes for a layer, without the layer's input."""
        states = self.model.activation * self.inner + self.routed
        if self.full or not self.model.experts:  # the linear layers of an MLP need their inputs for a gradient
            states += self.inner + self.routed
        return self.tokens * (self._saved_for_attention + self.mlp_entry * states)

    @property
    def _saved_for_attention(self) -> int:
        """Autograd saves these bytes for a token in one layer, without its MLP and without the layer's input."""
        model = self.model
        query = model.heads * model.head_dim
        key = model.kv_heads * model.head_dim
        more_norms = model.norms - 2
        inputs, projections = 2, 5  # inputs of projections: of queries, keys and values, and of gate and up
        if model.experts:
            inputs, projections = 1, 3
        if self.full:  # autocast casts the input of each projection, and of a router
            casts = projections + bool(model.experts)
            return (12 + 2 * casts + 8 * more_norms) * model.hidden + (4 + 6 * model.head_norms) * (query + key)
        of_hidden = 8 + 2 * inputs + 4 * more_norms
        of_query = 4 + 4 * model.head_norms
        of_key = of_query
        if self.copies_inputs:  # autocast casts each copy back
            of_hidden += 2 * (projections - inputs)
            of_query += 2
        return of_hidden * model.hidden + of_query * query + of_key * key

    @property
    def _widest(self) -> int:
        """Entries of the largest linear layer."""
        return max(a * b for a, b in self.model.projections)

    @property
    def _gradients(self) -> int:
        """The most that gradients of states take at once in the backward of a layer."""
        model, tokens = self.model, self.tokens
        if self.full or model.experts:
            # of the experts' inner states or of their outputs, whichever are more
            states = max(2 * self.inner + self.routed, 3 * self.routed) + 2 * self.routed * model.expert_biases
            gradients = tokens * (self.mlp_entry * states + (_residual(self.mode) + 2) * model.hidden)
        elif self.copies_inputs:
            gradients = tokens * (6 * self.inner + 10 * model.hidden)
        else:
            gradients = tokens * (4 * self.inner + 2 * model.hidden)
        if self.mode == "QLoRA" and not model.experts:  # bitsandbytes dequantises one matrix at a time
            gradients = max(gradients, 2 * self._widest + 2 * tokens * self.inner)
        if model.norms > 2:  # the norm after an MLP has five float32 tensors, while all of the MLP is saved
            gradients = max(gradients, 24 * tokens * model.hidden)
        return gradients

    @property
    def layer_backward(self) -> float:
        """The peak of the backward of a layer whose forward is computed again."""
        model = self.model
        if not self.full:
            return self.saved + self._gradients
        # a gradient before it is added, and its bf16 form
        weights = 6 * self._widest + 4 * model.experts * model.hidden * model.intermediate
        peak = self.saved + (self.cast_weights / model.layers + max(self._gradients, weights))
        if model.tied and not self.critic:
            peak += 4 * model.table  # the gradient of the head, which waits for that of the embedding
        return peak


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
