"""The table of transfers between CPU and GPU for which the CPU waits, with the reason for each.

Every row of `cases.py` has the transfers of `EACH_RUN`, and those that `ROWS` names for it. A new row with none
beyond `EACH_RUN` needs no entry here. The numbers are exact, so that one transfer more or less fails.

Phases are "begin" and "end" of the training, "rollout", "forward" and "backward" of a micro-batch, "refresh" of a
reward model, and "step" for all else. A number is for each run of the phase, or for units: "first" run, "token" of the
longest completion, "round" of dynamic sampling, "batch" and "measured batch" of a reward model. A log reads its
metrics in one transfer.
"""

from typing import Any

from tests.conformance.cases import MIXTURE
from tests.trainers.tools import rollout

WHY = {
    # every rollout
    "packing.sequence_lengths": "TRL pads its samples. Their lengths are read once, for all micro-batches",
    "advantages.total_rewards": "TRL's weights of the reward functions are on the CPU",
    "feature.StepRewardsFeature.on_rewards": "an infinite reward is an error, and NaN a warning",
    # rollouts of a feature
    "metrics.Metrics._countable": "a number that the CPU knows becomes a metric",
    "generation.GenerationPasses.routes": "the tokens and routes of a generation are matched with its completions",
    "token_record.aligned": "records of a generation are matched with the tokens of the padded batch, on the CPU",
    "routes.share_prefix_routes": "the number of different prompts is the size of a result",
    "candidates.CandidateSets.from_mask": "the number of candidates is the size of the record",
    "candidates.CandidateSets.to": "sets are recorded on the CPU: the KV cache needs the memory",
    "candidates.CandidateSets.take": "the sizes of sets are the shapes of what is computed; backward knows them",
    "candidates.CandidateSets.split": "TRL gets a tensor for each completion, whose size the CPU must know",
    "feature.SamplingMask.on_rollout_end": "a warning tells how many tokens have no set",
    "table.tabulate": "steps are combined on the CPU",
    "feature.StepRewardsFeature.keep_advantages": "a script may ask for the advantages of steps",
    "feature.StepRewardsFeature._completions": "steps are placed on the CPU",
    "rollout.log_advantages": "TRL's table of completions shows the advantages",
    "advantages.Advantages._checked": "advantages of a script must be finite",
    "advantages.Advantages._with_token_baseline": "processes agree on the width of their completions",
    "dynamic_sampling.DynamicSampling._round": "the CPU decides if there is another round",
    "dynamic_sampling.DynamicSampling._log": "numbers that the CPU knows become metrics",
    "dynamic_sampling.DynamicSampling._are_kept": "processes compare the steps of their completions",
    "resampling._Recorder.calculate_rewards": "completions are put together on the CPU",
    "resampling.ResampledRollout.finish": "rewards go back to the device",
    "advantages.Advantages.on_rewards": "a reward below 0 is an error",
    "targets._is_truncated": "the tokens that end a text are known to the CPU",
    "feature.RewardModel.compute_rewards": "TRL takes rewards as numbers",
    "engine_check.EngineCheck.on_rollout_end": "an engine with another model is an error",
    "training_report.TrainingReport.on_rollout_end": "some answers are kept as text: rewards and five columns",
    # elsewhere
    "nonfinite_steps.NonfiniteSteps.around_grad_norm": "the norm, which is logged, decides if a step is taken",
    "nonfinite_steps.NonfiniteSteps.admits": "so does that of a critic; a line says what is not finite",
    "pooling.histogram": "the edges of bins are copied to a device once, and stay there",
    "skip_zero_weight.with_gradient": "the CPU decides which sequences go through the model",
    "metrics.Metrics._exchange": "a move of the reference needs the metrics so far",
    "skip_zero_weight.SkipZeroWeight.on_train_end": "a line tells how many tokens had no gradient",
    "model.ScalarHeadModel.is_fresh": "a reward model of zeros is named, and measured only after its training",
    "training.measure": "figures of held-out examples",
}
EACH_RUN = {
    "rollout": {
        "packing.sequence_lengths": 1,
        "advantages.total_rewards": 1,
        "feature.StepRewardsFeature.on_rewards": 1,
    },
    "step": {"nonfinite_steps.NonfiniteSteps.around_grad_norm": 4},  # one for each optimizer step of the run
    "end": {"skip_zero_weight.SkipZeroWeight.on_train_end": 1},
}
SHARED_PROMPTS = {"packing.sequence_lengths": 1}  # the tokens of prompts, to find equal ones
R3 = {"generation.GenerationPasses.routes": 2, "token_record.aligned": 3, "metrics.Metrics._countable": 1}
KEPT = {
    "rollout": {
        "candidates.CandidateSets.from_mask": {"token": 1},
        "candidates.CandidateSets.to": {"run": 2, "token": 2},
        "candidates.CandidateSets.take": 5,  # one for the samples, and one for each of two batches in two passes
        "candidates.CandidateSets.split": 1,
        "token_record.aligned": 3,
        "feature.SamplingMask.on_rollout_end": 2,
    },
    "forward": {"candidates.CandidateSets.take": 1},
}
ROUNDS = {
    "rollout.give_rewards": {"round": 1},
    "feature.StepRewardsFeature.on_rewards": {"round": 1},
    "resampling._Recorder.calculate_rewards": {"round": 1},
    "dynamic_sampling.DynamicSampling._round": {"round": 1},
    "dynamic_sampling.DynamicSampling._are_kept": {"round": 2},
    "dynamic_sampling.DynamicSampling._log": 1,
    "resampling.ResampledRollout.finish": 1,
}
QUANTILES = {"forward": {"pooling.histogram": {"first": 1}}}
SAMPLED = {"rollout": {"engine_check.EngineCheck.on_rollout_end": {"first": 1}}, **QUANTILES}
STEPS = {
    "table.tabulate": 4,
    "feature.StepRewardsFeature._completions": 1,
    "rollout.log_advantages": 1,
}
STEPS_IN_GRPO = {**STEPS, "feature.StepRewardsFeature.keep_advantages": 3, "metrics.Metrics._countable": 1}
CRITIC: dict[str, dict[str, Any]] = {
    "rollout": {**STEPS, "targets._is_truncated": 1, "packing.sequence_lengths": 1},  # of the pass for the values
    "step": {"nonfinite_steps.NonfiniteSteps.admits": 4},
}

_WITH_TERMS = ("gspo", "gspo_token", "gmpo", "dppo", "m2po", "kl", "penalty", "beta_column", "masks")

ROWS: dict[str, dict[str, dict[str, Any]]] = {
    **{f"policy_loss/{case}": QUANTILES for case in _WITH_TERMS},
    "policy_loss/RLOO": {"rollout": SHARED_PROMPTS},
    "padding_free/share_prompts": {"rollout": SHARED_PROMPTS},
    "skip_zero_weight/skip_zero_weight": {"forward": {"skip_zero_weight.with_gradient": 1}},
    "router_replay/R2": {"rollout": {"metrics.Metrics._countable": 1}},
    "router_replay/R3": {"rollout": R3},
    "sampling_mask/keep_sampling_mask": KEPT,
    "dynamic_sampling/zero_std": {"rollout": ROUNDS},
    "dynamic_sampling/reward_variance": {"rollout": ROUNDS},
    "step_rewards/process": {"rollout": STEPS_IN_GRPO, **QUANTILES},
    "step_rewards/return_to_go": {"rollout": STEPS_IN_GRPO},
    "advantages/MaxRL": {"rollout": {"advantages.Advantages.on_rewards": 2, "rollout.log_advantages": 1}},
    "advantages/advantage_baseline": {
        "rollout": {"advantages.Advantages._with_token_baseline": 2, "rollout.log_advantages": 1}
    },
    "advantages/own": {"rollout": {"advantages.Advantages._checked": 1, "rollout.log_advantages": 1}},
    "reference/RLOO": KEPT,
    "critic/full": CRITIC,
    "critic/LoRA": CRITIC,
    "pretraining_loss/ptx_coef": CRITIC,
    "reward_model/retrained": {
        "begin": {"model.ScalarHeadModel.is_fresh": 1},
        "rollout": {
            "feature.RewardModel.compute_rewards": 1,
            "packing.sequence_lengths": 1,
            "metrics.Metrics._countable": 2,
        },
        "refresh": {
            "model.ScalarHeadModel.is_fresh": 1,
            "packing.sequence_lengths": {"batch": 1, "measured batch": 1},
            "training.measure": {"measured batch": 1},
        },
    },
    "training_report/training_report": {"rollout": {"training_report.TrainingReport.on_rollout_end": 6}},
    "further/a KL with dr_grpo": QUANTILES,
    "further/a KL with luspo": QUANTILES,
    "further/a sampler with gspo_token": SAMPLED,
    "further/a sampler with gmpo": SAMPLED,
    "further/a sampler with dppo": SAMPLED,
    "further/a sampler with m2po": SAMPLED,
    "further/R3 with shared prompts": {
        "rollout": {**R3, **SHARED_PROMPTS, "routes.share_prefix_routes": 1},
    },
    "further/kept sets with LoRA": KEPT,
}
"""Row -> phase -> module and function -> transfers."""

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
