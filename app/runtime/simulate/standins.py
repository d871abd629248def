"""Stand-ins for the only parts of a pipeline that need files besides configurations: tokenizers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BatchEncoding


class SimulatedTokenizer:
    """Gives every text the same number of tokens, cut and padded as asked: memory depends on nothing else of it."""

    padding_side = "right"
    pad_token: str | None = "<pad>"
    eos_token = "</s>"
    pad_token_id = 0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.model_max_length = tokens

    def __call__(
        self,
        text: str | list[str] | None = None,
        *_: Any,
        padding: bool | str | None = None,
        max_length: int | None = None,
        **__: Any,
    ) -> BatchEncoding:
        """Ids of shape [texts, length] and their mask: ones for the tokens, zeros for padding."""
        texts = 1 if text is None or isinstance(text, str) else len(text)
        tokens = min(self.tokens, max_length) if max_length is not None else self.tokens
        length = max_length if padding == "max_length" and max_length is not None else tokens
        row = torch.cat([torch.ones(tokens, dtype=torch.int64), torch.zeros(length - tokens, dtype=torch.int64)])
        if self.padding_side == "left":
            row = row.flip(0)
        ids = row.repeat(texts, 1)
        return BatchEncoding({"input_ids": ids, "attention_mask": ids.clone()})

    def apply_chat_template(self, conversations: Any, **options: Any) -> BatchEncoding:
        return self([""] * len(conversations), **options)

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return [""] * len(ids)
