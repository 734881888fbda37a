"""Friendly errors for the commonest mistakes, which would otherwise have a poor message or train nothing."""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from datasets import Dataset

# what to set -> names in TRL's former PPO, in verl and in OpenRLHF
PPO_NAMES = {
    "model": "policy pretrain sft_model_path",
    "args": "config",
    "processing_class": "tokenizer",
    "train_dataset": "dataset prompt_data",
    "reward_funcs": "reward_model reward_model_path reward_pretrain",
    "value_model": "critic_pretrain",
    "kl_coef (the reference is the model as it was at the start)": "ref_model ref_policy",
    "kl_coef (the KL in the reward is always k1)": "init_kl_coef kl_penalty kl_estimator_in_reward",
    "kl_target (kl_coef follows it; no update is stopped early)": "adap_kl_ctrl early_stopping target target_kl",
    "kl_horizon": "horizon",
    "beta and kl_estimator": "kl_loss_coef kl_loss_type use_kl_loss",
    "epsilon and epsilon_high": "clip_ratio clip_ratio_high clip_ratio_low cliprange eps_clip eps_clip_low_high",
    "num_iterations": "max_epochs num_ppo_epochs ppo_epochs",
    "steps_per_generation and gradient_accumulation_steps": "mini_batch_size num_mini_batches ppo_mini_batch_size",
    "per_device_train_batch_size": "batch_size forward_batch_size local_rollout_forward_batch_size",
    "num_generations": "n_samples_per_prompt",
    "max_completion_length": "generate_max_len response_length",
    "lam": "gae_lambda lambd",
    "value_learning_rate (the value loss has no weight)": "critic_learning_rate vf_coef",
    "value_warmup_steps": "critic_warmup freezing_actor_steps",
    "cliprange_value": "value_clip",
    "entropy_coef": "entropy_coeff entropy_loss_coef",
    "generation_kwargs": "stop_token stop_token_id",
}
_ALIASES = {name: ours for ours, names in PPO_NAMES.items() for name in names.split()}


def near(given: object, names: Iterable[str], form: str = "{}") -> str:
    """Return " Did you mean ...?" with the known name closest to `given`, in any case of letters, or ""."""
    by_case = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(str(given).lower(), by_case, n=1, cutoff=0.7)
    return f" Did you mean {form.format(by_case[matches[0]])}?" if matches else ""


def refuse_names_of_other_ppos(given: Mapping[str, object], known: Collection[str] = ()) -> None:
    """Refuse arguments that are named as in another package's PPO; `known` names are taken.

    Raises:
        ValueError: The message has the name to use.
    """
    for name in sorted(given.keys() & _ALIASES.keys() - set(known)):
        raise ValueError(f"{name} is an option of another package's PPO. Set {_ALIASES[name]}.")


def refuse_small(dataset: object, args: Any) -> None:
    """Refuse a dataset that is smaller than a rollout, because TRL's sampler would drop all of it.

    Raises:
        ValueError: The message names both numbers.
    """
    prompts = args.generation_batch_size // args.num_generations
    smaller = "steps_per_generation" if args.steps_per_generation > 1 else "per_device_train_batch_size"
    if isinstance(dataset, Dataset) and len(dataset) < prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but each rollout needs {prompts} prompts (generation_batch_size="
            f"{args.generation_batch_size} / num_generations={args.num_generations}), so nothing would be trained. "
            f"Use a dataset with more rows, or set a smaller {smaller}."
        )


def checked_rollout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `rollout_func` to refuse token lists that TRL would pad, so that values would belong to other tokens.

    Raises:
        ValueError: The message names the key and both lengths.
    """

    @wraps(function)
    def checking(prompts: Sequence[object], *arguments: object, **keywords: object) -> Any:
        output = function(prompts, *arguments, **keywords)
        lengths = list(map(len, output["completion_ids"]))
        for name in ("logprobs", "env_mask"):
            found = lengths if output.get(name) is None else list(map(len, output[name]))
            if found != lengths:
                raise ValueError(
                    f"rollout_func returned {name} of lengths {found}, but completion_ids of lengths {lengths}. "
                    "Return one value for each token."
                )
        return output

    return checking


@contextmanager
def naming_columns(passed: Iterable[str]) -> Iterator[None]:
    """Say what TRL passes to a reward function, if its call fails: it may ask for a column that is not there."""
    try:
        yield
    except TypeError as error:
        error.add_note(f"TRL passes to a reward function by name: {', '.join(passed)}. Use these names, and **kwargs.")
        raise
