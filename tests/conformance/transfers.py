"""How often the CPU waits for a GPU, in each row of `cases.py` and each phase of a training.

Every row has the transfers of `EACH_RUN`, and those that `ROWS` adds. The numbers are exact, so that one transfer more
or less fails. A new row that adds none needs no entry.

Phases are "begin" and "end" of the training, "rollout", "forward" and "backward" of a micro-batch, "refresh" of a
reward model, and "step" for all else. A number counts for each run of the phase, or for the units of a dictionary: the
"first" run, a "token" of the longest completion, a "round" of dynamic sampling, a "batch" or "measured batch" of a
reward model. A log reads all its metrics in one transfer.

The CPU needs a value for one of four reasons. It decides something: to stop at a gradient or a reward that is not
finite, to go on with a round, to leave out sequences. It knows a size: of padded samples, of sets, of equal prompts.
It does the work: steps are placed and combined on the CPU, records of a generation are matched with its tokens. It
shows the value: a warning, TRL's table of completions, the report.
"""

from typing import Any

from tests.conformance.cases import MIXTURE
from tests.trainers.tools import rollout

EACH_RUN = {
    "rollout": 3,  # lengths of samples, weights of reward functions, finite rewards
    "step": 4,  # the norm of the gradient, for each optimizer step of the run
    "end": 1,  # a line tells how many tokens had no gradient
}
SHARED_PROMPTS = {"rollout": 1}  # the tokens of prompts, to find equal ones
QUANTILES = {"forward": {"first": 1}}  # the edges of bins are copied to a device once
SAMPLED = {"rollout": {"first": 1}, **QUANTILES}  # the engine check
# two for the record and the sets, one a token; one for each of two batches in two passes, and for the samples
KEPT = {"rollout": {"run": 13, "token": 3}, "forward": 1}
ROUNDS = {"rollout": {"run": 2, "round": 6}}  # rewards, steps, answers, and whether there is another round
STEPS = {"rollout": 10}
CRITIC = {"rollout": 8, "step": 4}  # steps, and the lengths of the pass for the values; the norm of the critic

_WITH_TERMS = ("gspo", "gspo_token", "gmpo", "dppo", "m2po", "kl", "penalty", "beta_column", "masks")

ROWS: dict[str, dict[str, int | dict[str, int]]] = {
    **{f"policy_loss/{case}": QUANTILES for case in _WITH_TERMS},
    "policy_loss/RLOO": SHARED_PROMPTS,
    "padding_free/share_prompts": SHARED_PROMPTS,
    "skip_zero_weight/skip_zero_weight": {"forward": 1},  # which sequences go through the model
    "router_replay/R2": {"rollout": 1},  # a metric
    "router_replay/R3": {"rollout": 6},  # tokens and routes of the generation
    "sampling_mask/keep_sampling_mask": KEPT,
    "dynamic_sampling/zero_std": ROUNDS,
    "dynamic_sampling/reward_variance": ROUNDS,
    "step_rewards/process": {**STEPS, **QUANTILES},
    "step_rewards/return_to_go": STEPS,
    "advantages/MaxRL": {"rollout": 3},  # no reward below 0, twice; the table of completions
    "advantages/advantage_baseline": {"rollout": 3},  # the width of completions on all processes; the table
    "advantages/own": {"rollout": 2},  # finite advantages; the table
    "reference/RLOO": KEPT,
    "critic/full": CRITIC,
    "critic/LoRA": CRITIC,
    "pretraining_loss/ptx_coef": CRITIC,
    "reward_model/retrained": {
        "begin": 1,  # a model of zeros is named
        "rollout": 4,  # scores, which TRL takes as numbers; lengths; metrics
        "refresh": {"run": 1, "batch": 1, "measured batch": 2},
    },
    "teacher/add": {"rollout": 1},  # the table
    "teacher/weight": {"rollout": 2},  # which sequences have an advantage; the table
    "teacher/moving": {"rollout": 1},
    "teacher/privileged": {"rollout": 3},  # the same two, and the lengths of the teacher's prompts
    "teacher/PPO": CRITIC,
    "training_report/training_report": {"rollout": 6},  # some answers are kept as text
    "further/a KL with dr_grpo": QUANTILES,
    "further/a KL with luspo": QUANTILES,
    "further/a sampler with gspo_token": SAMPLED,
    "further/a sampler with gmpo": SAMPLED,
    "further/a sampler with dppo": SAMPLED,
    "further/a sampler with m2po": SAMPLED,
    "further/R3 with shared prompts": {"rollout": 8},
    "further/kept sets with LoRA": KEPT,
}
"""Row -> phase -> transfers beyond those of `EACH_RUN`."""

# every option that compares the policy with a sampler
SAMPLER: dict[str, Any] = {
    **{"kl_estimator": "k2", "use_bias_correction_kl": True, "kl_ratio_denominator": "sampler"},
    **{"off_policy_mask_threshold": 0.1, "geometric_mask_range": [0.5, 2.0], "token_veto_threshold": 0.01},
    **{"sampler_penalty": 1e-3, "engine_check": 1e9, "build": {"rollout_func": rollout}},
}
FURTHER: dict[str, dict[str, Any]] = {
    "a KL with dr_grpo": {"loss_type": "dr_grpo", "kl_estimator": "k2"},
    "a KL with luspo": {"loss_type": "luspo", "kl_estimator": "k2"},
    **{f"a sampler with {name}": {**SAMPLER, "loss_type": name} for name in ("gspo_token", "gmpo", "dppo", "m2po")},
    "R3 with shared prompts": {**MIXTURE, "router_replay": "R3", "share_prompts": True},
    "kept sets with LoRA": {"keep_sampling_mask": True, "top_p": 0.8, "lora": True},
}
"""Rows beyond those of `cases.py`: name -> arguments of `tiny.trainer`, and the model."""
