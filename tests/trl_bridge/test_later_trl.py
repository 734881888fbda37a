"""Arguments that TRL does not have yet. Its LM head's are in tests/features/sampling_mask/test_model.py."""

import inspect
import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from trl.generation.vllm_generation import VLLMGeneration

from trl_steady.trl_bridge.generate_ahead import build_request
from trl_steady.trl_bridge.log_probs import OTHER_INPUTS
from trl_steady.trl_bridge.vllm import SteadyGeneration


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_a_column_that_trls_method_for_log_probs_takes_is_handed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the policy would be scored in another way than TRL's rollout has scored it."""
    method = trl.GRPOTrainer._get_per_token_logps_and_entropies
    known = inspect.signature(method)
    assert set(OTHER_INPUTS) == {*[*known.parameters][8:]}
    more = inspect.Parameter("support_ids", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    later = known.replace(parameters=[*known.parameters.values(), more])
    monkeypatch.setattr(inspect.unwrap(method), "__signature__", later, raising=False)
    found = runpy.run_module("trl_steady.trl_bridge.log_probs")["other_inputs"]({"support_ids": 1, "advantages": 2})
    assert found == {"support_ids": 1}


def test_a_request_ahead_is_built_from_the_arguments_that_trls_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later:
        __module__ = "trl.trainer.later"
        vllm_generation = object.__new__(SteadyGeneration)
        accelerator = SimpleNamespace(is_main_process=False)

        def _generate_and_score_completions(self, rows: list[Any]) -> None:
            vars(self)["_generate_single_turn"](rows, None, {}, 4, "more", more=True)

    asked: list[Any] = []
    monkeypatch.setattr(VLLMGeneration, "generate", lambda _, *arguments: asked.append(arguments))
    assert build_request(Later(), [1, 2]) == {}  # type: ignore[arg-type]
    assert asked == [([1, 2], None, 4)]
