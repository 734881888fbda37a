"""Generation options that exclude tokens from sampling or change their probabilities."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Options of transformers' and vLLM's generation that may exclude tokens -> True for a value that does.
_TRUNCATIONS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("top_p", "top_h", "typical_p"), lambda value: value < 1),
    **dict.fromkeys(("top_k", "min_p"), lambda value: value > 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), lambda value: 0 < value < 1),
    **dict.fromkeys(("vllm_structured_outputs_regex", "structured_outputs"), bool),
    **dict.fromkeys(("bad_words", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), bool),
    **dict.fromkeys(("allowed_token_ids", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), bool),
    **dict.fromkeys(("min_new_tokens", "min_length", "min_tokens", "forced_eos_token_id"), bool),
}
# Options that make some tokens likelier than others -> the value that has no effect.
_WEIGHTINGS: dict[str, object] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0.0),
    **{name: {} for name in ("logit_bias", "sequence_bias", "watermarking_config")},
    "exponential_decay_length_penalty": (),
}


def truncations(sampling: Mapping[str, Any]) -> list[str]:
    """Return the settings that exclude tokens from sampling, such as "top_p=0.9"."""
    return [f"{name}={value!r}" for name, value in sampling.items() if _TRUNCATIONS.get(name, lambda _: False)(value)]


def weightings(sampling: Mapping[str, Any]) -> list[str]:
    """Return the settings that change the probabilities of the kept tokens, such as "repetition_penalty=1.1"."""
    return [f"{name}={value!r}" for name, value in sampling.items() if _WEIGHTINGS.get(name, value) != value]


def beyond_sets(weightings: Sequence[str]) -> str:
    """Return a sentence about settings that kept tokens do not correct for, with a leading blank; "" without any."""
    if not weightings:
        return ""
    what = f"{', '.join(weightings)} also changes the probabilities of the kept tokens, and ratios include this change"
    return f" {what} even with keep_sampling_mask=True."
