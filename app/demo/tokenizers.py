"""Two small byte-level BPE vocabularies in the formats that ``Qwen2VLProcessor`` and ``CLIPTokenizer`` load.

``Kandinsky5T2VPipeline`` wraps every prompt in a fixed template and drops the first 128 tokens of the result.  The Qwen
vocabulary is therefore tuned so that the template's prefix is exactly 128 tokens; otherwise the first words of the
prompt would be cut, or the template would leak in.
"""

from __future__ import annotations

import collections
import json
import random
from pathlib import Path
from typing import Any

from diffusers import Kandinsky5T2VPipeline
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from app.demo.clips import random_attributes, random_caption, with_defaults
from app.demo.vocabulary import DEFAULT_NEGATIVE, DISTRACTORS, KNOWN_WORDS

PREFIX_TOKENS = 128
Merge = tuple[str, str]
_CLIP_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


def prompt_template() -> str:
    """The pipeline's own prompt template, with one ``{}`` for the prompt."""
    bare = Kandinsky5T2VPipeline(
        transformer=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        scheduler=None,
    )
    if bare.prompt_template_encode_start_idx != PREFIX_TOKENS:
        raise RuntimeError("this diffusers release drops another number of template tokens")
    return str(bare.prompt_template)


def _train_bpe(pre_tokenizer: Any, corpus: list[str], **options: Any) -> list[Merge]:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=20000,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        **options,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]


def _vocabulary(alphabet: list[str], merges: list[Merge], specials: list[str]) -> dict[str, int]:
    tokens = dict.fromkeys([*alphabet, *(a + b for a, b in merges), *specials])
    return {token: index for index, token in enumerate(tokens)}


def _qwen_tokenizer(merges: list[Merge]) -> Any:
    return Qwen2Tokenizer(
        vocab=_vocabulary(sorted(pre_tokenizers.ByteLevel.alphabet()), merges, _SPECIALS),
        merges=merges,
        additional_special_tokens=_SPECIALS[1:],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        padding_side="right",
    )


def _fit_prefix(merges: list[Merge], prefix: str, used: set[str]) -> list[Merge]:
    """Drop merges of words that occur only in the template until its prefix has exactly PREFIX_TOKENS tokens."""
    tokenizer = _qwen_tokenizer(merges)
    count = len(tokenizer(prefix)["input_ids"])
    seen = collections.Counter(tokenizer.tokenize(prefix))
    spare = sorted((t for t in seen if seen[t] == 1 and t not in used and len(t) > 8 and t[0] != "<"), key=len)
    while count < PREFIX_TOKENS and spare:
        token = spare.pop()
        fewer = [merge for merge in merges if merge[0] + merge[1] != token]
        # Only safe when no other merge builds upon the dropped one.
        if any(token in merge for merge in fewer):
            continue
        if len(_qwen_tokenizer(fewer)(prefix)["input_ids"]) == count + 1:
            merges, count = fewer, count + 1
    if count != PREFIX_TOKENS:
        raise RuntimeError(f"the prompt prefix has {count} tokens, not {PREFIX_TOKENS}")
    return merges


def build_tokenizers(out: Path, seed: int = 1) -> None:
    """Write ``tokenizer`` (Qwen2-VL processor) and ``tokenizer_2`` (CLIP) into a folder."""
    prefix = prompt_template().split("{}")[0]
    rng = random.Random(seed)
    captions = [random_caption(*with_defaults(random_attributes(rng), rng), rng) for _ in range(6000)]
    words = sorted(word for word in KNOWN_WORDS.union(DISTRACTORS) if word.isalpha())

    template_text = prefix.replace("<|im_start|>", "").replace("<|im_end|>", "")
    spaced = [f" {form}" for word in words for form in (word, word.upper())]
    corpus = captions + spaced * 3 + [template_text] * 40 + [DEFAULT_NEGATIVE] * 10
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated", False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    merges = _train_bpe(splitter, corpus)
    tokenizer = _qwen_tokenizer(merges)
    used = {t for text in [*captions, *spaced, DEFAULT_NEGATIVE] for t in tokenizer.tokenize(text)}
    tokenizer = _qwen_tokenizer(_fit_prefix(merges, prefix, used))
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(), tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor()
    )
    processor.save_pretrained(str(out / "tokenizer"))

    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_REGEX), "removed", True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    lowered = [caption.lower() for caption in captions] + words * 3 + [DEFAULT_NEGATIVE.lower()] * 10
    merges = _train_bpe(splitter, lowered, end_of_word_suffix="</w>")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = _vocabulary(letters + [f"{c}</w>" for c in letters], merges, ["<|startoftext|>", "<|endoftext|>"])
    CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77).save_pretrained(str(out / "tokenizer_2"))
