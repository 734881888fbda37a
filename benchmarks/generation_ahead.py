"""Measure seconds per step without and with `async_generate`: a vLLM server on core 0, the trainer on core 1.

    .venv-vllm/bin/python -m benchmarks.generation_ahead [--pairs 5] [--steps 12] [--length 23] [--answers 16]

trains a LoRA adapter on a random model of 17 million parameters. All answers are equally long, and each rollout feeds
one update. The first two steps of a run are not counted. Runs without and with the option take turns. A step without
it spends a share g on generation, so the step can become at most 1 / max(g, 1 - g) times as fast. It needs the
environment of `make test-vllm`, and two cores that nothing else uses.
"""

import contextlib
import importlib
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import measuring

compare = importlib.import_module("async.compare")  # a keyword is no name

SIZES = {
    **{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 8, "initializer_range": 0.02},
}


def main() -> None:
    """Print both times and their ratio for each pair, and at the end their quartiles and the share of the limit."""
    options = measuring.parser(__doc__, pairs=5, steps=12, length=23, answers=16).parse_args()
    measuring.heading(options)
    rollout = {"max_completion_length": options.length, "per_device_train_batch_size": options.answers}
    rollout |= {"max_steps": options.steps, "num_generations": 8}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measuring.save_model(folder, True, SIZES)
        with compare.served(folder, folder / "log") as url:
            for pair in range(options.pairs):
                for ahead in (False, True) if pair % 2 else (True, False):
                    with contextlib.redirect_stdout(sys.stderr):
                        trainer = compare.build(folder, url, ahead=ahead, **rollout)
                        trainer.metrics.clock.is_on = True
                        seconds[ahead].append(compare.seconds(trainer))
                    rows = [row for row in trainer.state.log_history if "loss" in row][compare.WARM_UP :]
                    if not ahead:
                        shares.append(statistics.mean(row["time/generation"] for row in rows) / seconds[ahead][-1])
                without, with_it = seconds[False][-1], seconds[True][-1]
                print(
                    f"pair {pair + 1}: without {without:.3f} s, with {with_it:.3f} s, ratio {without / with_it:.3f}; "
                    f"g {shares[-1]:.3f}",
                    flush=True,
                )
    limits = [1 / max(share, 1 - share) for share in shares]
    ratio, share = measuring.quartiles(seconds[False], seconds[True]), statistics.median(shares)
    reached = [a / b / limit for a, b, limit in zip(seconds[False], seconds[True], limits, strict=True)]
    print(
        f"ratio {ratio['median']:.2f} ({ratio['low']:.2f}, {ratio['high']:.2f}); g {share:.2f}; "
        f"limit {statistics.median(limits):.2f}, of which {statistics.median(reached):.1%} are reached"
    )


if __name__ == "__main__":
    main()
