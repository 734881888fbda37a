"""A tiny vision-language model and prompts with images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from tests.tools import tiny

CHAT = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}:"
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llava")
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=28, patch_size=14),
        text_config=LlamaConfig(**{**tiny.SIZES, "vocab_size": len(tokenizer)}),
        image_token_index=image_token,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tiny.SIZES["eos_token_id"]
    model.save_pretrained(folder)
    size = {"height": 28, "width": 28}
    return folder, LlavaProcessor(
        image_processor=CLIPImageProcessor(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=CHAT,
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def pictures(rows: int = 8, *, lengths: tuple[int, ...] = (1,)) -> Dataset:
    """Prompts that ask as often as the lengths say, in turn."""
    texts = ["what" * lengths[i % len(lengths)] for i in range(rows)]
    prompts = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": each}]}] for each in texts]
    images = [[Image.new("RGB", (28, 28), (30 * i, 255 - 30 * i, 100))] for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "images": images})
