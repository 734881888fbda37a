"""Generation options that exclude tokens from sampling or change their probabilities."""

from collections.abc import Callable
from typing import Any

# Options of transformers' and vLLM's generation that may exclude tokens -> True for a value that does.
TRUNCATIONS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("top_p", "top_h", "typical_p"), lambda value: value < 1),
    **dict.fromkeys(("top_k", "min_p"), lambda value: value > 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), lambda value: 0 < value < 1),
    **dict.fromkeys(("vllm_structured_outputs_regex", "structured_outputs"), bool),
    **dict.fromkeys(("bad_words", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), bool),
    **dict.fromkeys(("allowed_token_ids", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), bool),
    **dict.fromkeys(("min_new_tokens", "min_length", "min_tokens", "forced_eos_token_id"), bool),
}
# Options that make some tokens likelier than others -> the value that has no effect.
WEIGHTINGS: dict[str, object] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0.0),
    **{name: {} for name in ("logit_bias", "sequence_bias", "watermarking_config")},
    "exponential_decay_length_penalty": (),
}
