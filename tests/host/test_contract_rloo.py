"""Compare what TRL's RLOO reads with `RLOO_CONTRACT`, as for GRPO."""

import inspect
import re
import textwrap
from dataclasses import fields

import pytest
import trl

import trl_steady
from tests.host.contract import CONTRACT, RLOO_CONTRACT
from tests.host.test_contract import reads
from trl_steady import host
from trl_steady.config.shared import SharedOptions

SOURCE = textwrap.dedent(inspect.getsource(trl.RLOOTrainer._compute_loss))


@pytest.mark.parametrize("kind", ["attributes", "arguments", "inputs"])
def test_its_loss_reads_what_the_contract_lists(kind: str) -> None:
    assert reads(SOURCE)[kind] == set(getattr(RLOO_CONTRACT, kind))


@pytest.mark.parametrize("method", RLOO_CONTRACT.parameters)
def test_the_methods_we_wrap_have_the_parameters_we_know(method: str) -> None:
    found = tuple(inspect.signature(inspect.unwrap(getattr(trl.RLOOTrainer, method))).parameters)
    assert found == RLOO_CONTRACT.parameters[method]


def test_every_method_of_trls_that_the_seam_overrides_is_in_both_contracts() -> None:
    for kind, contract in ((trl.GRPOTrainer, CONTRACT), (trl.RLOOTrainer, RLOO_CONTRACT)):
        overridden = {name for name in vars(host.Steady) if name in dir(kind) and callable(getattr(kind, name))}
        inherited = {name for name in overridden if not getattr(kind, name).__module__.startswith(("trl.", "transf"))}
        # what transformers documents for subclasses needs no contract
        public = {"__init__", "compute_loss_context_manager", "_issue_warnings_after_load"}
        assert overridden - inherited - public <= set(contract.parameters), kind


def test_it_scores_as_grpo_does() -> None:
    """By the same code, so that what is known of GRPO's scoring method holds."""
    grpo, rloo = (
        inspect.getsource(inspect.unwrap(kind._get_per_token_logps_and_entropies))
        for kind in (trl.GRPOTrainer, trl.RLOOTrainer)
    )
    assert grpo == rloo


def test_its_buffering_is_what_checkpoints_hold() -> None:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(trl.RLOOTrainer._prepare_inputs)))
    found = reads(re.sub(r"\binputs\b", "batch", source))
    assert found["attributes"] == set(RLOO_CONTRACT.buffering)
    assert found["arguments"] == {"steps_per_generation"}


def test_our_trainer_has_trls_constructor_and_our_config_trls_options() -> None:
    assert inspect.signature(trl_steady.RLOOTrainer) == inspect.signature(trl.RLOOTrainer)
    assert issubclass(trl_steady.RLOOTrainer, trl.RLOOTrainer) and issubclass(trl_steady.RLOOConfig, trl.RLOOConfig)
    ours, theirs = ({own.name for own in fields(config)} for config in (trl_steady.RLOOConfig, trl.RLOOConfig))
    assert ours - theirs == set(inspect.get_annotations(SharedOptions)) - {"METHOD"}


def test_transformers_divides_its_loss_by_the_window() -> None:
    """TRL itself divides the loss of GRPO. `regrouping.divided_by` depends on this difference."""
    assert trl.GRPOTrainer.loss_is_scaled_for_ga and not trl.RLOOTrainer.loss_is_scaled_for_ga
