"""DeepSeekMath's loop: its settings, a small run of each arm from one start, and the comparison of the arms."""

import json
from typing import Any

from tests.project import recipe
from tests.project.recipe import parse

FOLDER = recipe.FOLDER / "deepseekmath_loop"
NAME = "deepseekmath_loop/smollm2-135m"


def test_the_recorded_runs_are_what_the_readme_says(recipes: Any) -> None:
    readme = recipe.without_spaces(FOLDER / "README.md")
    recorded = {
        (arm, seed): json.loads((FOLDER / f"results/{arm}-seed{seed}.json").read_text())
        for arm in recipes.arms.ARMS
        for seed in range(3)
    }
    assert len(list((FOLDER / "results").glob("*.json"))) == len(recorded)
    ways = ("sampled at temperature 1, 2 each", "greedy")
    for arm in recipes.arms.ARMS:
        shares = [[recorded[arm, seed]["accuracy"][way]["after"] for way in ways] for seed in range(3)]
        shares.append([sum(own) / 3 for own in zip(*shares, strict=True)])
        assert f"| `{arm}` | {' | '.join(f'{sampled:.1%}, {greedy:.1%}' for sampled, greedy in shares)} |" in readme
    assert "43.2%, 39.2% and 37.5% sampled, and 68.5% greedy" in readme
    found = recipes.arms.differences(list(recorded.values()))
    for other in ("frozen", "without_replay"):
        for way in ways:
            rows = [found[(other, "retrained", seed, way)] for seed in ("0", "1", "2", "mean")]
            cells = [f"{100 * d.difference:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})" for d in rows]
            decoding = way.split()[0]
            shown = f"| {decoding} | {' | '.join(cells)} |" if other == "frozen" else f"{cells[-1]} {decoding}"
            assert shown in readme
    _, args = parse(recipes, NAME)
    for (arm, seed), own in recorded.items():
        before = [f"{own['accuracy'][way]['before']:.1%}" for way in ways]
        assert before == [("43.2%", "39.2%", "37.5%")[seed], "68.5%"]
        settings = own["objective"]
        assert settings["arm"] == arm and own["seed"] == seed
        names = recipes.deepseekmath_loop.OBJECTIVE
        assert {name: settings[name] for name in names} == {name: getattr(args, name) for name in names}
