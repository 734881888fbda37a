"""A tiny mixture of experts of every family, what is seen of its routers, and what their gates should weigh."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tests.tools import families

EXPERTS = 6
_SCALE = 1.7

Options = Mapping[str, Any]


def _set(*lines: str) -> tuple[str, ...]:
    return tuple(" ".join(lines).split())


@dataclass(frozen=True)
class Gate:
    """How the gate weights of a family come out of its router's logits."""

    scores: Callable[[Tensor], Tensor]
    """Of all experts."""
    normalised: bool | str
    """Over the chosen ones; or the option that decides."""
    scale: str | None = None
    """The option that all weights are multiplied by."""


_softmax = functools.partial(torch.softmax, dim=-1)
_root_of_softplus: Callable[[Tensor], Tensor] = lambda logits: F.softplus(logits).sqrt()

_GATES: dict[Gate, tuple[str, ...]] = {
    Gate(_softmax, "norm_topk_prob"): _set(
        "flex_olmo lara_mini mellum olmoe qwen2_moe qwen3_moe qwen3_next qwen4_exp qwen4_exp_text"
    ),
    # those that take the softmax of the chosen logits among them
    Gate(_softmax, True): _set(
        "aria_text cohere2_moe ernie4_5_moe gemma4_text gpt_oss granitemoe granitemoe_swa granitemoehybrid",
        "granitemoeshared hunyuan_v1_moe jetmoe minimax mixtral qwen3_5_moe qwen3_5_moe_text",
    ),
    Gate(_softmax, False): _set("dbrx jamba zaya"),
    Gate(_softmax, False, "routed_scaling_factor"): _set("deepseek_v2 longcat_flash"),
    Gate(torch.sigmoid, "norm_topk_prob", "routed_scaling_factor"): _set(
        "axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 dots1 dots3_note dots3_note_text exaone_moe glm4_moe",
        "glm4_moe_lite glm_moe_dsa hy_v4 kimi_linear lfm2_moe mimo_v2_flash nemotron_h sarvam_mla sarvam_moe",
        "solar_open",
    ),
    Gate(torch.sigmoid, "norm_topk_prob"): _set("beam flint kolibri1"),
    Gate(torch.sigmoid, True): _set("laguna minimax_m2 minimax_m3_vl_text"),
    Gate(torch.sigmoid, False): _set("llama4_text"),
    Gate(torch.sigmoid, True, "route_scale"): _set("afmoe inkling2_text inkling_text"),
    Gate(torch.sigmoid, True, "router_scaling_factor"): _set("hy_v3"),
    Gate(_root_of_softplus, True, "routed_scaling_factor"): _set("deepseek_v4"),
}
FAMILIES = {name: gate for gate, names in _GATES.items() for name in names}

_GROUPED: dict[str, Options] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
}
for _name in _set("bailing_hybrid kimi_linear"):
    _GROUPED[_name] = {"num_expert_group": 2, "topk_group": 1}
for _name in _set(
    "axk1 axk2 beam deepseek_v3 deepseek_v32 dots1 dots3_note_text exaone_moe glm4_moe glm4_moe_lite glm_moe_dsa",
    "hy_v4 mimo_v2_flash nemotron_h solar_open",
):
    _GROUPED[_name] = {"n_group": 2, "topk_group": 1}
CASES: dict[str, tuple[str, Options]] = {
    **{name: (name, {}) for name in sorted(FAMILIES)},
    **{f"{name} in groups": (name, options) for name, options in _GROUPED.items()},
    "axk2 without groups": ("axk2", {"n_group": None, "topk_group": None}),
    "cohere2_moe by sigmoid": ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False}),
    "dbrx as it is": ("dbrx", {"normalize": None}),
    "deepseek_v3 as it is": ("deepseek_v3", {"norm_topk_prob": False}),
    "laguna with capped logits": ("laguna", {"moe_router_logit_softcapping": 0.5}),
    "lfm2_moe without a bias": ("lfm2_moe", {"use_expert_bias": False}),
    "qwen3_moe normalised": ("qwen3_moe", {"norm_topk_prob": True}),
}
"""Name -> family, and the options of its config that are not as ever."""


@torch.no_grad()
def build(case: str) -> PreTrainedModel:
    """The tiny random model of a case, in float32 and ready to be evaluated; the same each time."""
    family, options = CASES[case]
    model = families.build(family, own=_config(family, options))
    for name, buffer in model.named_buffers():
        if "bias" in name:  # of choices
            buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def _config(family: str, options: Options) -> PretrainedConfig:
    config = families.config(family)
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if hasattr(config, name):
            setattr(config, name, EXPERTS)
    for name in ("routed_scaling_factor", "route_scale", "router_scaling_factor"):
        if hasattr(config, name):
            setattr(config, name, _SCALE)
    if family == "gemma4_text":
        config.enable_moe_block, config.top_k_experts, config.moe_intermediate_size = True, 2, 16
    if family == "llama4_text":
        config.num_experts_per_tok = 2
    if family == "dbrx":
        config.ffn_config.moe_num_experts = EXPERTS
        config.ffn_config.moe_normalize_expert_weights = options.get("normalize", 2.0)
        return config
    for name, value in options.items():
        setattr(config, name, value)
    return config


@dataclass
class Layer:
    """A router, and the experts that it chooses from; after a pass, what was seen of them."""

    name: str
    block: nn.Module
    router: nn.Module
    arguments: tuple[Any, ...] = ()
    """Of the router."""
    keywords: dict[str, Any] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """(N, E)."""
    gates: Tensor = field(default_factory=lambda: torch.empty(0))
    """(N, E), 0 where an expert is not chosen."""

    @property
    def experts(self) -> list[nn.Parameter]:
        """Their parameters, of size E or a multiple of it in front."""
        inside = self.block if self.is_grouped_by_router else self.block.get_submodule("experts")
        own = [each for each in inside.parameters() if not any(each is other for other in self.router.parameters())]
        return [each for each in own if each.size(0) % EXPERTS == 0 and each.numel() > 64]

    @property
    def is_grouped_by_router(self) -> bool:
        """JetMoe's sort tokens by expert."""
        return "JetMoe" in type(self.router).__name__

    @property
    def skips(self) -> bool:
        """Zaya's have one expert more, which does nothing."""
        return "Zaya" in type(self.router).__name__

    @property
    def weight(self) -> nn.Parameter:
        """That makes logits."""
        (own,) = (
            each
            for name, each in self.router.named_parameters()
            if each.dim() == 2 and ("router_mlp" not in name if self.skips else each.size(0) >= EXPERTS)
        )
        return own

    @property
    def chosen(self) -> Tensor:
        """(N, E) bool: which experts are."""
        chosen = self.gates != 0
        if self.skips:
            chosen[:, -1] = ~chosen.any(-1)
        return chosen


def layers(model: nn.Module) -> list[Layer]:
    """By what transformers calls them, not by the code under test."""
    found = []
    for name, block in model.named_modules():
        child = "router" if hasattr(block, "router") else "gate"
        router = getattr(block, child, None)
        is_mixture = hasattr(block, "experts") or "JetMoe" in type(router).__name__
        if isinstance(router, nn.Module) and is_mixture and "Hash" not in type(router).__name__:
            found.append(Layer(name, block, router))
    return found


@contextmanager
def seen(of: Sequence[Layer]) -> Iterator[None]:
    """Hooks that note what routers get and what experts get."""
    handles = []
    for layer in of:

        def before(_: nn.Module, arguments: Any, keywords: Any, layer: Layer = layer) -> None:
            layer.arguments, layer.keywords = _detached(arguments), keywords
            layer.logits = _logits(layer)

        def after(_: nn.Module, __: Any, outputs: Any, layer: Layer = layer) -> None:
            layer.gates = _of_outputs(layer, outputs)

        def experts(_: nn.Module, arguments: Any, layer: Layer = layer) -> None:
            layer.gates = _dense(layer, arguments[1], arguments[2])

        handles.append(layer.router.register_forward_pre_hook(before, with_kwargs=True))
        if layer.is_grouped_by_router or "Llama4" in type(layer.router).__name__:
            handles.append(layer.router.register_forward_hook(after))
        else:
            handles.append(layer.block.get_submodule("experts").register_forward_pre_hook(experts))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def live(layer: Layer) -> Layer:
    """What the router itself makes of the hidden states that it had."""
    alone = Layer(layer.name, layer.block, layer.router, layer.arguments, layer.keywords, layer.logits)
    outputs = layer.router(*layer.arguments, **layer.keywords)
    if hasattr(layer.block, "route_tokens_to_experts"):  # Dbrx's decides in the block
        decided = layer.block.route_tokens_to_experts(outputs)
        indices, weights = sorted(decided, key=torch.is_floating_point)  # whose order is another below 5.14
        alone.gates = _dense(layer, indices, weights)
    else:
        alone.gates = _of_outputs(layer, outputs)
    return alone


def changes(layer: Layer, routes: Tensor) -> int:
    """How many of the choices (N, K) the live router would not have made, of the rows that have some."""
    other = live(layer).chosen
    return sum(not other[token, expert] for token, own in enumerate(routes.tolist()) for expert in own if expert < 255)


@torch.no_grad()
def expected_gates(case: str, layer: Layer, chosen: Tensor) -> Tensor:
    """(N, E) for chosen (N, K): by the formula of the family, of the scores of all experts."""
    family, options = CASES[case]
    gate, config = FAMILIES[family], _config(family, options)
    logits = layer.logits
    cap = getattr(config, "moe_router_logit_softcapping", 0)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    scores, is_normalised = gate.scores(logits), gate.normalised
    if getattr(config, "expert_selection_fn", None) == "sigmoid":
        scores, is_normalised = torch.sigmoid(logits), "norm_topk_prob"
    weights = scores.gather(1, chosen)
    if getattr(config, is_normalised) if isinstance(is_normalised, str) else is_normalised:
        total = weights.sum(-1, keepdim=True)
        if family == "inkling_text":  # shared experts share
            total = total + scores[:, EXPERTS:].sum(-1, keepdim=True)
        if family == "lfm2_moe":
            total = total + 1e-6
        weights = weights / total
    if family == "dbrx" and config.ffn_config.moe_normalize_expert_weights:
        weights = weights / weights.square().sum(-1, keepdim=True).sqrt()
    if gate.scale is not None:
        weights = weights * getattr(config, gate.scale)
    if family == "inkling_text":
        weights = weights * layer.router.get_parameter("global_scale")
    if family == "gemma4_text":
        weights = weights * layer.router.get_parameter("per_expert_scale")[chosen]
    if layer.skips:
        weights = weights.masked_fill(chosen == EXPERTS, 0)
    return torch.zeros_like(scores).scatter(1, chosen, weights)[:, : layer.gates.size(1)]


def _detached(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.detach() if isinstance(each, Tensor) else each for each in arguments)


@torch.no_grad()
def _logits(layer: Layer) -> Tensor:
    router, states = layer.router, layer.arguments[0]
    if layer.skips:
        own = router.get_submodule("down_proj")(states)
        past = layer.keywords.get("router_states")
        if past is not None and hasattr(router, "router_states_scale"):
            own = own + past * router.get_parameter("router_states_scale")
        return router.get_submodule("router_mlp")(own).flatten(0, -2)
    states = states.flatten(0, -2)
    if hasattr(router, "per_expert_scale"):  # Gemma 4
        states = states * (states.square().mean(-1, keepdim=True) + layer.router.eps).rsqrt()
        states = states * router.get_parameter("scale") * states.size(-1) ** -0.5
    return F.linear(states, layer.weight, dict(router.named_parameters()).get("bias"))


def _of_outputs(layer: Layer, outputs: Any) -> Tensor:
    if layer.is_grouped_by_router:
        _, tokens, weights, sizes, logits = outputs
        gates = torch.zeros_like(logits)
        gates[tokens, torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))] = weights.detach()
        return gates
    if "Llama4" in type(layer.router).__name__:
        return outputs[0].detach()
    return _dense(layer, outputs[2], outputs[1])


def _dense(layer: Layer, indices: Tensor, weights: Tensor) -> Tensor:
    shared = layer.logits.size(1) - EXPERTS if "InklingTopk" in type(layer.router).__name__ else 0
    gates = weights.new_zeros(len(indices), layer.logits.size(1) - shared)
    return gates.scatter(1, indices, weights).detach()
