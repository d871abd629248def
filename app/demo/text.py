"""The two tiny text encoders: trained on captions alone to name the attributes, then frozen."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    DynamicCache,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLProcessor,
)

from app.demo.clips import Attributes, random_attributes, random_caption, with_defaults
from app.demo.stages import StepRandom, run_steps
from app.demo.tokenizers import PREFIX_TOKENS, prompt_template
from app.demo.vocabulary import ATTRIBUTES, DEFAULT_NEGATIVE, DISTRACTORS
from app.runtime.guard import assert_trainable, prepare_for_training

WIDTH = 128
"""Hidden size of both text encoders."""
PADS = 4
"""Trailing pad tokens encoded with every caption: the pipeline pads batched prompts and masks nothing."""
_SEED = 7


class Encoded(NamedTuple):
    """Text encoder outputs for a batch of captions."""

    tokens: Tensor
    """Qwen's last hidden states after the template's prefix: (batch, tokens, WIDTH)."""
    lengths: Tensor
    """Tokens of each caption, its end token included: (batch,)."""
    pooled: Tensor
    """CLIP's pooled output: (batch, WIDTH)."""
    ids: Tensor
    """Qwen token ids: (batch, tokens)."""


def make_qwen(tokenizer: Any) -> Any:
    """A Qwen2.5-VL of two text layers; its vision tower is a stub, since the pipeline shows it no images."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": WIDTH,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "patch_size": 14,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def make_clip(tokenizer: Any) -> Any:
    """A CLIP text encoder of two layers."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=77,
            projection_dim=WIDTH,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class TextEncoders(nn.Module):
    """Both encoders with their tokenizers: they encode as the pipeline does, the template's prefix only once."""

    def __init__(self, tokenizers: Path) -> None:
        super().__init__()
        self.processor = Qwen2VLProcessor.from_pretrained(str(tokenizers / "tokenizer"))
        self.clip_tokenizer: Any = CLIPTokenizer.from_pretrained(str(tokenizers / "tokenizer_2"))
        self.tokenizer: Any = self.processor.tokenizer
        self.qwen = make_qwen(self.tokenizer)
        self.clip = make_clip(self.clip_tokenizer)
        prefix, self._suffix = prompt_template().split("{}")
        self.prefix: Tensor = self.tokenizer(prefix, return_tensors="pt")["input_ids"]
        assert self.prefix.shape[1] == PREFIX_TOKENS
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        # The usual deviation of 0.02 is far too timid for two layers of this width.
        for part in (self.qwen.model.language_model, self.clip):
            for name, parameter in part.named_parameters():
                if parameter.dim() == 2:
                    embedding = 0.2 if "position" in name else 0.5
                    std = embedding if "embed" in name else 1 / math.sqrt(parameter.shape[1])
                    nn.init.normal_(parameter, std=std)

    def forward(self, captions: list[str], pads: int = 0) -> Encoded:
        """Encode captions, each followed by at least `pads` pad tokens."""
        rows = [self.tokenizer(caption + self._suffix)["input_ids"] for caption in captions]
        width = max(map(len, rows)) + pads
        ids = torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        model = self.qwen.model.language_model
        cache = DynamicCache(config=model.config)
        model(input_ids=self.prefix, cache=cache, use_cache=True)
        cache.batch_repeat_interleave(len(rows))
        positions = torch.arange(PREFIX_TOKENS, PREFIX_TOKENS + width)[None, None].expand(3, len(rows), width)
        hidden = model(input_ids=ids, cache=cache, use_cache=True, position_ids=positions).last_hidden_state
        batch = self.clip_tokenizer(captions, max_length=77, truncation=True, padding=True, return_tensors="pt")
        pooled = self.clip(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["pooler_output"]
        return Encoded(hidden, torch.tensor([len(row) for row in rows]), pooled, ids)

    def save(self, out: Path) -> None:
        """Write ``text_encoder`` and ``text_encoder_2`` as the pipeline loads them."""
        self.qwen.save_pretrained(str(out / "text_encoder"))
        self.clip.save_pretrained(str(out / "text_encoder_2"))


class AttributeHeads(nn.Module):
    """Linear classifiers of every attribute, used only while the encoders are trained; the last class is "nothing"."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {key: len(values) + 1 for key, values in ATTRIBUTES.items()}
        self.qwen = nn.ModuleDict({key: nn.Linear(WIDTH, size) for key, size in sizes.items()})
        self.clip = nn.ModuleDict({key: nn.Linear(WIDTH, size) for key, size in sizes.items()})

    def forward(self, encoded: Encoded) -> dict[str, Tensor]:
        last = encoded.tokens[torch.arange(len(encoded.lengths)), encoded.lengths - 1]
        logits = {f"qwen.{key}": head(last) for key, head in self.qwen.items()}
        return logits | {f"clip.{key}": head(encoded.pooled) for key, head in self.clip.items()}


def labelled_captions(count: int, rng: random.Random, held_out: bool | None = False) -> tuple[list[str], Tensor]:
    """Captions and their class indices (count, attributes); a few captions are empty or say nothing that is known."""
    captions: list[str] = []
    labels: list[list[int]] = []
    nothing = [len(values) for values in ATTRIBUTES.values()]
    for _ in range(count):
        if rng.random() < 0.03:
            captions.append(rng.choice(("", DEFAULT_NEGATIVE)))
            labels.append(nothing)
            continue
        attributes, named = with_defaults(random_attributes(rng, held_out), rng)
        if rng.random() < 0.03:
            attributes, named = with_defaults(Attributes("ball", "red", "bounce", "gray", "mid"), rng)
            words = [rng.choice([*DISTRACTORS, "a", "the", "in", "on", "with"]) for _ in range(rng.randint(1, 8))]
            captions.append(" ".join(words))
        else:
            captions.append(random_caption(attributes, named, rng))
        labels.append([values.index(v) for values, v in zip(ATTRIBUTES.values(), attributes, strict=True)])
    return captions, torch.tensor(labels)


def text_loss(encoders: TextEncoders, heads: AttributeHeads, captions: list[str], labels: Tensor) -> Tensor:
    """Attribute cross-entropy from both encoders plus a next-token loss that keeps Qwen's tokens informative."""
    encoded = encoders(captions)
    logits = heads(encoded)
    losses = [
        F.cross_entropy(logits[f"{name}.{key}"], labels[:, column])
        for name in ("qwen", "clip")
        for column, key in enumerate(ATTRIBUTES)
    ]
    targets = encoded.ids[:, 1:]
    mask = torch.arange(1, encoded.ids.shape[1])[None] < encoded.lengths[:, None]
    words = encoders.qwen.lm_head(encoded.tokens[:, :-1][mask])
    return torch.stack(losses).sum() + 0.3 * F.cross_entropy(words, targets[mask])


@torch.no_grad()
def text_accuracy(encoders: TextEncoders, heads: AttributeHeads, count: int, seed: int = 99) -> dict[str, float]:
    """Share of held-out captions whose attributes each encoder names."""
    captions, labels = labelled_captions(count, random.Random(seed), held_out=True)
    logits = heads(encoders(captions))
    columns = list(ATTRIBUTES)
    return {
        name: float((value.argmax(1) == labels[:, columns.index(name.split(".")[1])]).float().mean())
        for name, value in logits.items()
    }


def train_text(
    tokenizers: Path, checkpoint: Path, steps: int, batch: int = 64
) -> tuple[TextEncoders, dict[str, float]]:
    """Train both encoders (or resume, or just load when done); returns them frozen, and their held-out accuracy."""
    torch.manual_seed(_SEED)
    encoders, heads = TextEncoders(tokenizers), AttributeHeads()
    trained = nn.ModuleList([encoders, heads])
    prepare_for_training(trained, "cpu")
    encoders.qwen.model.visual.requires_grad_(False)  # no picture is ever shown to it
    parameters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98))
    assert_trainable(trained, optimizer)

    def step(index: int) -> float:
        rate = 2e-3 * min(1.0, (index + 1) / 50) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * index / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = text_loss(encoders, heads, *labelled_captions(batch, StepRandom(_SEED, index).python))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return float(loss.detach())

    run_steps(checkpoint, {"encoders": encoders, "heads": heads, "optimizer": optimizer}, steps, step)
    encoders.eval().requires_grad_(False)
    return encoders, text_accuracy(encoders, heads, 512)
