"""The memory of a trainer on its device, by arithmetic: its weights, and the passes of a micro-batch."""

import functools
from collections import Counter
from collections.abc import Container, Generator
from typing import Any, cast

import torch
from packaging.version import Version

from trl_steady.config.shared import SharedOptions
from trl_steady.functional.memory import ADAM, Model, on_host, passes
from trl_steady.trainers.base import SteadyTrainer

_ADAPTERS = {"default": "adapter", "ref": "reference", "value": "critic", "reward": "reward model"}


def memory(trainer: SteadyTrainer) -> dict[str, float]:
    """Return the bytes on a device by their purpose: as `docs/memory.md`, but for the weights that have been loaded.

    The micro-batch has the longest completions, without their prompts.
    """
    weights = _Weights()
    adapters = getattr(trainer.model, "peft_config", {})
    for part, model in _models(trainer):
        weights.add(part, model, adapters)
    parts: dict[str, float] = {**weights.bytes}
    if weights.trained:
        parts["gradients"] = weights.trained
        parts["optimizer, if AdamW"] = ADAM * weights.trained
    sizes = _sizes(trainer.model)
    if sizes is not None:
        parts[f"micro-batch of {_tokens(trainer.args)} tokens"] = _micro_batch(trainer, sizes, weights)
    return parts


def host_memory(trainer: SteadyTrainer) -> int:
    """Return the bytes of the micro-batch of `memory` that `offload` keeps in the host's memory."""
    args: SharedOptions = trainer.args
    checkpointing = _checkpointing(args)
    sizes = _sizes(trainer.model)
    if sizes is None or not checkpointing["offload"]:
        return 0
    mode = "full"
    if getattr(trainer.model, "peft_config", {}):
        mode = "LoRA"
    return on_host(sizes, mode, _tokens(args), every_n_layers=checkpointing["every_n_layers"])


class _Weights:
    """Bytes of the weights on a device, and what they say about the passes."""

    def __init__(self) -> None:
        self.bytes = Counter[str]()
        """By their purpose."""
        self.trained = 0
        """Bytes of the weights that have gradients and moments: the policy's, and the critic's."""
        self.is_quantised = False
        self.has_wide_adapter = False
        self._seen = set[torch.nn.Parameter]()

    def add(self, part: str, model: torch.nn.Module, adapters: Container[str]) -> None:
        """Count the parameters of a model that were not counted before."""
        for name, parameter in model.named_parameters():
            scales = getattr(getattr(parameter, "quant_state", None), "absmax", None)  # of 4-bit weights
            self.is_quantised |= scales is not None
            if parameter in self._seen:
                continue
            self._seen.add(parameter)
            entries = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3: of the whole
            size = entries * parameter.element_size()
            if scales is not None:
                size += scales.numel() * scales.element_size()
            owner = _owner(model, name, adapters) or part
            self.bytes[owner] += size
            if owner == "adapter" and parameter.element_size() > 2:
                self.has_wide_adapter = True
            # the adapter of a critic needs gradients in its own pass only
            if owner == "critic" or (parameter.requires_grad and owner in ("weights", "adapter")):
                self.trained += size


def _owner(model: torch.nn.Module, parameter: str, adapters: Container[str]) -> str | None:
    """Return whose adapter has a parameter; None for weights of the model itself.

    PEFT keeps adapters in dictionaries. A module of the model may have the name of an adapter too, such as `value`.
    """
    words = parameter.split(".")
    for place, word in enumerate(words):
        if word not in adapters:
            continue
        holder = model.get_submodule(".".join(words[:place]))
        if isinstance(holder, torch.nn.ModuleDict | torch.nn.ParameterDict):
            return _ADAPTERS.get(word, word)
    return None


def _micro_batch(trainer: SteadyTrainer, sizes: Model, weights: _Weights) -> int:
    """Return the most bytes that a micro-batch takes: of the policy, or of a critic, whose passes come first."""
    args: SharedOptions = trainer.args
    has_adapter = bool(getattr(trainer.model, "peft_config", {}))
    mode = critic_mode = "full"
    if has_adapter:
        mode = critic_mode = "LoRA"
    if has_adapter and weights.is_quantised:
        critic_mode = "QLoRA"
        if not weights.has_wide_adapter:  # float32 adapters take as much on a quantised base
            mode = "QLoRA"
    device = args.device.type
    checkpointing = _checkpointing(args)
    if device == "cpu":  # which is the host
        checkpointing["offload"] = False
    of_passes = functools.partial(
        passes,
        sizes,
        tokens=_tokens(args),
        **checkpointing,
        on_cpu=device == "cpu",
        copies_head=device != "cuda" or Version(torch.__version__) < Version("2.8"),
    )
    peaks = [_peak(of_passes(mode=mode))]
    if getattr(trainer, "critic", None) is not None:
        peaks.append(_peak(of_passes(mode=critic_mode, critic=True)))
    return round(max(peaks))


def _checkpointing(args: SharedOptions) -> dict[str, Any]:
    """Return the settings of gradient checkpointing, by their names in `passes`."""
    given = cast("dict[str, Any]", args.gradient_checkpointing_kwargs or {})
    return {
        "checkpointing": args.gradient_checkpointing,
        "every_n_layers": given.get("every_n_layers", 1),
        "offload": args.gradient_checkpointing and given.get("offload", False),
    }


def _tokens(args: SharedOptions) -> int:
    """Return the tokens of a micro-batch of the longest completions."""
    return args.per_device_train_batch_size * (args.max_completion_length or 0)


def _peak(moments: dict[str, float]) -> float:
    """Return what is kept for backward and the highest moment on top of it."""
    return moments.pop("kept") + max(moments.values())


def _models(trainer: SteadyTrainer) -> Generator[tuple[str, torch.nn.Module]]:
    """Yield the purpose of each model of a trainer, and the model."""
    critic = getattr(trainer, "critic", None)
    models: list[tuple[str, Any]] = [
        ("weights", trainer.model),
        ("reference", trainer.ref_model),
        ("critic", getattr(critic, "backbone", None)),
        ("critic", getattr(critic, "head", None)),
    ]
    for function in trainer.reward_funcs:
        models.append(("reward model", function))
    for part, model in models:
        if isinstance(model, torch.nn.Module):
            yield part, model


def _sizes(model: object) -> Model | None:
    """Return the sizes of a decoder; None if its config has other names, or sizes that differ among layers."""
    try:
        config = cast(Any, model).config.get_text_config()
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
        intermediate = config.intermediate_size
        chosen = 1
        if experts:
            intermediate = getattr(config, "moe_intermediate_size", intermediate)  # gpt-oss and Mixtral have one size
            chosen = config.num_experts_per_tok
        norms = _norms(cast(torch.nn.Module, model))
        sizes = Model(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            intermediate=intermediate,
            tied=config.tie_word_embeddings,
            experts=experts,
            chosen=chosen,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            norms=sum(not is_of_head for is_of_head in norms.values()) or 2,
            head_norms=any(norms.values()),
        )
        if config.model_type == "gpt_oss":
            sizes = sizes._replace(activation=6, expert_biases=True)
    except Exception:  # such as a class of transformers for an attribute of layers
        return None
    for size in sizes:
        if not isinstance(size, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            return None  # some have lists, or None
    return sizes


def _norms(model: torch.nn.Module) -> dict[str, bool]:
    """Return the names of the norms in the first decoder layer, with True for those of queries and keys."""
    norms: dict[str, bool] = {}
    for name, _ in model.named_modules():
        _, found, name_in_layer = name.partition(".layers.0.")
        if found and name_in_layer.endswith("norm"):
            norms[name_in_layer] = name_in_layer.endswith(("q_norm", "k_norm"))
    return norms
