"""The losses by who has them, written out, so that a change of the package's table is seen."""

NATIVE_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
SEQUENCE_RATIO_LOSS_TYPES = ("gspo", "gspo_token")
