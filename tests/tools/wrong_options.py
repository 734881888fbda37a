"""Options that a user gets wrong, in Python, in YAML and on the command line, with what each message says."""

from typing import Any, NamedTuple

INF, NAN = float("inf"), float("nan")


class Options(NamedTuple):
    """Options of `GRPOConfig`; a message names the first and its value, as `option=value`."""

    given: dict[str, Any]
    message: str
    """Regular expression."""
    kind: type = ValueError
    shown: str | None = None
    """What the message names, where it is not that."""
    is_ours: bool = True
    """False: TRL's own message."""


class Command(NamedTuple):
    """What stands on a command line, or in the YAML file of `--config`."""

    given: str
    message: str
    is_yaml: bool = False


def unknown(option: str, value: Any, meant: str) -> Options:
    return Options({option: value}, rf"{option}={value!r} cannot work\. Set .* Did you mean {meant!r}\?")


def out(option: str, value: Any, message: str = "", **others: Any) -> Options:
    return Options({option: value, **others}, rf"cannot work\. Set {option} to .*{message}")


def idle(message: str, **given: Any) -> Options:
    return Options(given, message, UserWarning)


CHOICES = [
    unknown("loss_type", "GSPO", "gspo"),
    unknown("loss_type", "gspo-token", "gspo_token"),
    unknown("loss_type", "DrGRPO", "dr_grpo"),
    out("loss_type", None, "'grpo', .*'gspo' or 'gspo_token'"),
    unknown("importance_sampling_level", "sequences", "sequence"),
    out("importance_sampling_level", "group", "'token' or 'sequence'"),
    unknown("kl_estimator", "K3", "k3"),
    out("kl_estimator", "abs", "'k1', 'k2' or 'k3'"),
    unknown("kl_ratio_denominator", "samplers", "sampler"),
    out("kl_ratio_denominator", "mu", "'old' or 'sampler'"),
    unknown("off_policy_mask_level", "Token", "token"),
    out("off_policy_mask_level", "group", "'sequence' or 'token'"),
    unknown("step_advantage", "return-to-go", "return_to_go"),
    out("step_advantage", "gae", "'process' or 'return_to_go'"),
    unknown("router_replay", "r3", "R3"),
    out("router_replay", True, "'R2', 'R3', or None for no replay of routes"),
    out("adapter_dtype", "float16", "'float32', or None"),
    unknown("adapter_dtype", "Float32", "float32"),
    out("vllm_adapter_sync", "lora", "True or False"),
    unknown("scale_rewards", "batched", "batch"),
    out("scale_rewards", "std", "'group', 'batch' or 'none'"),
    unknown("multi_objective_aggregation", "normalise_then_sum", "normalize_then_sum"),
    out("multi_objective_aggregation", "mean", "'sum_then_normalize' or 'normalize_then_sum'"),
    unknown("vllm_mode", "co-locate", "colocate"),
    out("vllm_importance_sampling_mode", "mask", "'token_truncate', .* or 'sequence_mask'"),
]

RANGES = [
    out("geometric_mask_range", (0.99,), r"\(low, high\), with low <= 1 <= high"),
    out("geometric_mask_range", (1.01, 0.99)),
    out("geometric_mask_range", (1.01, 1.02)),
    out("geometric_mask_range", {"low": 0.9, "high": 1.1}),
    out("geometric_mask_range", 0.99, "or None for no mask"),
    out("token_veto_threshold", "1e-4", "such as 0.0001"),
    out("token_veto_threshold", 0.0, "above 0 and below 1"),
    out("token_veto_threshold", 1.5),
    out("engine_check", 0.0, "above 0, in nats a token, or None for no comparison with the engine"),
    out("engine_check", float("nan"), "above 0, in nats a token, or None for no comparison with the engine"),
    out("ref_model_sync_kl", 0.0, "above 0, in nats a token, or None", beta=0.1),
    out("ref_model_sync_steps", 0, "1, 2, 3, ... optimizer steps"),
    out("ref_model_sync_steps", INF),
    out("ref_model_mixup_alpha", 0.0, "above 0 and at most 1"),
    out("ref_model_mixup_alpha", 1.5),
    out("token_budget", 0, "1 token or more, or None for per_device_train_batch_size"),
    out("token_budget", "4096"),
    out("token_budget", True),
    out("epsilon", -1e-4, "0 or above"),
    out("epsilon", NAN),
    out("epsilon", "small"),
    out("epsilon_high", NAN),
    out("epsilon_high", -0.1),
    out("delta", 0.0, "above 0, or None"),
    out("beta", None),
    out("beta", -0.04, r"0 \(no KL\) or above"),
    out("beta", "0.04"),
    out("num_iterations", None),
    out("num_iterations", 0, "1, 2, 3"),
    out("num_iterations", 1.5),
    out("off_policy_mask_threshold", -0.1, "None for no mask"),
    out("learning_rate", "1e-6", "a finite number"),
    out("learning_rate", NAN),
    out("entropy_coef", NAN),
    out("entropy_coef_delta", -0.1),
    out("temperature", 0.0, r"above 0 \(the policy is sampled"),
    out("temperature", True),
    out("top_p", 0.0, "above 0 and at most 1"),
    out("top_k", None, "or 0 for no top-k filter"),
    out("top_k", 0.5),
    out("min_p", 2.0),
    out("repetition_penalty", 0.0, "1 for no penalty"),
    out("top_entropy_quantile", 1.5, "1 keeps every token"),
    out("top_entropy_quantile", -1, loss_type="dapo"),
    out("per_device_train_batch_size", 0, "1 or more"),
    out("steps_per_generation", 0, "None for gradient_accumulation_steps"),
    out("gradient_accumulation_steps", 0),
    out("generation_batch_size", 16.0, "None for the batch of", steps_per_generation=None),
    out("max_completion_length", 0, "1 or more tokens"),
    out("max_completion_length", 99.5),
    out("num_generations", None, "2 or more"),
    out("num_generations", 4.0),
    out("num_generations_eval", -1, "or None for num_generations"),
    out("reward_weights", 1.0, "a list of finite numbers, one for each reward function"),
    out("reward_weights", [1.0, NAN]),
    out("sapo_temperature_pos", 0.0, "above 0", loss_type="sapo"),
    out("vespo_k_neg", -1.0, "0 or above", loss_type="vespo"),
    out("router_aux_loss_coef", -0.1, "or None for the model's own"),
    out("generation_kwargs", "top_p=0.9", "a dict or a string with a JSON object"),
    out("generation_kwargs", '{"top_p": 0.9'),
    out("vllm_importance_sampling_clip_max", 0.0, "None for no upper bound", use_vllm=True),
    out("trim_padding", "no", "True or False"),
    out("trim_padding", None, "True or False"),
    out("share_prompts", "false"),
    out("keep_sampling_mask", [0.9]),
    out("router_replay_reference", "R3"),
    out("ref_model_sync_reset_optimizer", 2),
    out("sync_ref_model", "yes"),
    out("use_vllm", "false"),
    out("gradient_checkpointing", "no"),
]

CONTRADICTIONS = [
    Options(
        {"kl_estimator": "k1", "use_bias_correction_kl": False, "beta": 0.1},
        r"with use_bias_correction_kl=False: .* expectation is 0.*'k2' or 'k3'",
    ),
    Options({"sync_ref_model": True}, r"with beta=0.0: .*Set beta above 0 .*or set sync_ref_model=False"),
    Options({"ref_model_sync_kl": 0.1, "beta": 0.1}, r"would be ignored: .*Set sync_ref_model=True"),
    Options({"ref_model_sync_reset_optimizer": True}, r"would be ignored: .*Set sync_ref_model=True"),
    Options({"importance_sampling_level": "token"}, r"contradicts loss_type='gspo'.*Leave importance_sampling_level"),
    Options({"epsilon": 1.0, "epsilon_high": 1e-3}, r"with loss_type='gspo' never clips from below.*0.0003"),
    Options({"epsilon": INF}, r"with loss_type='gspo' never clips from below"),
    Options({"delta": 1.0002}, r"is inside the clip range.*Set delta above 1.0004, or None"),
    Options({"sapo_temperature_pos": 2.0}, r"is an option of loss_type='sapo'.*Leave .* unset"),
    Options({"vespo_k_neg": 1.0}, r"is an option of loss_type='vespo' and would be ignored"),
    Options(
        {"max_completion_length": None, "loss_type": "dr_grpo"},
        r"with loss_type='dr_grpo', which divides by it\. Set max_completion_length, or set loss_type='dapo'",
    ),
    Options(
        {"entropy_coef_min": 2.0, "use_adaptive_entropy": True},
        r"is above entropy_coef_max=1.0\. Set entropy_coef_min",
    ),
    Options(
        {"generation_kwargs": {"top_k": "5"}},
        r"top_k='5' in generation_kwargs is not a number\. Set top_k",
        shown="top_k='5'",
    ),
    Options({"top_k": -1}, r"is only valid for vLLM; transformers refuses it\. Set top_k=0"),
    Options(
        {"generation_kwargs": {"num_return_sequences": 2}},
        r"in generation_kwargs: TRL repeats each prompt itself\. Leave .* unset, and set num_generations=2",
        shown="num_return_sequences=2",
    ),
    Options({"token_budget": 512, "trim_padding": False}, r"with trim_padding=False.*Set trim_padding=True, or leave"),
    Options({"share_prompts": True, "trim_padding": False}, r"with trim_padding=False.*Set trim_padding=True, or"),
    Options({"token_budget": 512, "loss_type": "bnpo"}, r"with loss_type='bnpo'.*Set loss_type='dapo'"),
    Options({"token_budget": 512, "entropy_coef": 0.1}, r"with entropy_coef=0.1 .*Switch it off, or leave"),
    Options({"token_budget": 512, "top_entropy_quantile": 0.2}, r"with top_entropy_quantile=0.2.*Set top_entropy_q"),
    Options(
        {"token_budget": 512, "ref_model_sync_kl": 0.1, "sync_ref_model": True, "beta": 0.1},
        r"with ref_model_sync_kl=0.1.*Leave one of the two unset",
    ),
]

TRLS_OWN = [
    Options({"num_generations": 1}, r"at least 2 generations", shown="provided 1", is_ours=False),
    Options({"num_generations": 3}, r"must be divisible by num_generations \(3\)", shown="(16)", is_ours=False),
    Options({"generation_batch_size": 16}, r"can not be both configured", shown="steps_per_gen", is_ours=False),
    Options({"auto_find_batch_size": True}, r"Set auto_find_batch_size=False", shown="auto_find", is_ours=False),
]

WARNED = [
    idle(
        r"never clips from below, because a ratio is always above 0\. Set epsilon below 1",
        epsilon=20,
        loss_type="grpo",
    ),
    idle(r"never clips from below.*Set epsilon below 1", epsilon=1.0, epsilon_high=0.28, loss_type="dapo"),
    idle(r"only a token that has become 21 times.*Set epsilon below 1; DAPO", epsilon=20, loss_type="luspo"),
    idle(
        r"nearly never happens\. Set epsilon_high below 1; DAPO uses epsilon_high=0\.28",
        epsilon_high=20,
        loss_type="bnpo",
    ),
    idle(r"is the cap of the ratio itself.*Set epsilon_high=5\.0", epsilon_high=0.28, loss_type="cispo"),
    idle(r"unset, it is epsilon=0\.3\) .*Set epsilon_high=5\.0", epsilon=0.3, loss_type="cispo"),
    idle(r"with loss_type='cispo' there is no lower clip", epsilon=0.1, epsilon_high=5.0, loss_type="cispo"),
    idle(
        r"with loss_type='sapo' there is no lower clip\. Set loss_type='dapo', or leave", epsilon=3, loss_type="sapo"
    ),
    idle(r"with loss_type='vespo' there is no clip\. Set", epsilon_high=0.3, loss_type="vespo"),
    idle(r"clip range of loss_type='grpo' \(upper end 1\.2\).*Set delta above 1\.2, or", delta=1.1, loss_type="grpo"),
    idle(r"with loss_type='sapo' there is no two-sided clip\. Set", delta=4.0, loss_type="sapo"),
    idle(
        r"clip range for token ratios, but the ratio is per seq.* Set epsilon=0\.0003 and epsilon_high=0\.0004",
        epsilon=0.2,
    ),
    idle(
        r"token ratios, but loss_type='gmpo' clips log-ratios, .*Leave epsilon unset, or set epsilon=0\.4",
        epsilon=0.2,
        loss_type="gmpo",
    ),
    idle(
        r"cannot act: every update is on-policy.* Set steps_per_generation=4", loss_type="gspo", steps_per_generation=1
    ),
    idle(r"nothing reads it\. Set loss_type='sapo', or leave", sapo_temperature_pos=2.0, loss_type="dapo"),
    idle(r"nothing reads it\. Set loss_type='vespo', or leave", vespo_k_pos=1.0, loss_type="grpo"),
    idle(r"cannot act: with beta=0\.0 there is no KL\. Set beta above 0", kl_estimator="k2"),
    idle(r"cannot act: with beta=0\.0 there is no KL\. Set beta above 0", use_bias_correction_kl=False),
    idle(r"with off_policy_mask_threshold=None there is no mask\. Set", off_policy_mask_level="token"),
    idle(r"with sync_ref_model=False the reference does not move\. Set sync_ref", ref_model_sync_steps=64, beta=0.1),
    idle(r"with sync_ref_model=False the reference does not move\. Set", ref_model_mixup_alpha=1.0, beta=0.1),
    idle(
        r"ends after max_steps=100, .*ref_model_sync_steps=512\)\. Set", sync_ref_model=True, beta=0.1, max_steps=100
    ),
    idle(r"with use_vllm=False only a rollout_func could read it\. Set use_vllm=True, or leave", vllm_mode="server"),
    idle(
        r"with use_vllm=False only a rollout_func could read it\. Set use_vllm=True",
        vllm_importance_sampling_mode="token_mask",
    ),
    idle(r"with vllm_mode='colocate' there is no server\. Set", vllm_server_host="gpu7", use_vllm=True),
    idle(
        r"with vllm_mode='server' the server decides this\. Pass it",
        vllm_gpu_memory_utilization=0.9,
        use_vllm=True,
        vllm_mode="server",
    ),
    idle(
        r"with vllm_importance_sampling_correction=False there are no importance weights\. Set that to True",
        vllm_importance_sampling_clip_max=2.0,
        use_vllm=True,
        vllm_importance_sampling_correction=False,
    ),
    idle(r"with use_adaptive_entropy=False nothing reads it\. Set use_adaptive_entropy=True", entropy_target=1.0),
    idle(r"with router_replay=None there are no routes\. Set router_replay", router_replay_reference=True),
    idle(r"sampling excludes no token\. Set one of them, or leave", keep_sampling_mask=True),
    Options(
        {"generation_kwargs": {"temprature": 0.9}},
        r"rollout_func reads it: .*GenerationConfig has no 'temprature'\. Did you mean 'temperature'\? Leave it",
        UserWarning,
        shown="temprature=0.9",
    ),
    Options(
        {"generation_kwargs": {"temperature": 0.5}},
        r"log-probs are computed with temperature=1\.0\. Set the option temperature=0\.5 instead",
        UserWarning,
        shown="temperature=0.5",
    ),
    Options(
        {"generation_kwargs": {"max_new_tokens": 64}},
        r"overrides max_completion_length=\d+\. Set the option max_completion_length=64 instead",
        UserWarning,
        shown="max_new_tokens=64",
    ),
    Options(
        {"generation_kwargs": {"max_tokens": 64}, "use_vllm": True},
        r"overrides max_completion_length=\d+\. Set the option max_completion_length=64 instead",
        UserWarning,
        shown="max_tokens=64",
    ),
    Options(
        {"generation_kwargs": {"do_sample": False}},
        r"the completions of a prompt are alike.* Leave do_sample unset",
        UserWarning,
        shown="do_sample=False",
    ),
]

OPTIONS = [*CHOICES, *RANGES, *CONTRADICTIONS, *TRLS_OWN, *WARNED]

COMMANDS = [
    Command("--loss_type GSPO", r"loss_type='GSPO' cannot work\. Set .*Did you mean 'gspo'"),
    Command("--router_replay r3", r"router_replay='r3' cannot work\. Set .*Did you mean 'R3'"),
    Command("--geometric_mask_range 0.9", r"geometric_mask_range=\[0\.9\] cannot work\. Set"),
    Command("--temperature 0", r"temperature=0\.0 cannot work\. Set"),
    Command("geometric_mask_range: 0.99", r"geometric_mask_range=0\.99 cannot work\. Set", is_yaml=True),
    Command("geometric_mask_range: [a, b]", r"geometric_mask_range=\['a', 'b'\] cannot work\. Set", is_yaml=True),
    Command("trim_padding: [1]", r"trim_padding=\[1\] cannot work\. Set trim_padding to True or False", is_yaml=True),
    Command("share_prompts: 3", r"share_prompts=3 cannot work\. Set share_prompts to True or False", is_yaml=True),
    Command("token_budget: 10.5", r"token_budget=10\.5 cannot work\. Set", is_yaml=True),
    Command("num_generations: null", r"num_generations=None cannot work\. Set", is_yaml=True),
    Command("loss_type: [gspo]", r"loss_type=\['gspo'\] cannot work\. Set", is_yaml=True),
    Command("beta: null", r"beta=None cannot work\. Set", is_yaml=True),
    Command("top_k: null", r"top_k=None cannot work\. Set", is_yaml=True),
    Command("reward_weights: 1.0", r"reward_weights=1\.0 cannot work\. Set", is_yaml=True),
]
