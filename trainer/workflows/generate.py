"""Text from a finished model."""

import logging
import time

from trainer.common.processes import use_cores
from trainer.common.ranks import best_precision, device_type
from trainer.config import GenerationRequest
from trainer.model.generate import Sampler, generate, text_until
from trainer.runs.models import find_model

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 8
"""Last tokens of a prompt with which its continuation is decoded."""


def continue_prompts(request: GenerationRequest) -> list[str]:
    """Continue the prompts with the checkpoint; return the continuations."""
    use_cores()
    saved = find_model(request.checkpoint)
    device = device_type()
    model = saved.for_inference(device, best_precision(device))
    tokenizer = saved.tokens.tokenizer
    bos = [] if saved.tokens.first is None else [saved.tokens.first]
    prompts = [
        [*bos, *tokenizer.encode(text, add_special_tokens=False).ids] for text in request.prompts
    ]

    def text_after(prompt: list[int], tokens: list[int]) -> str:
        # Decoded alone, the first word has no space before it in tokenizers of SentencePiece.
        context = prompt[-CONTEXT_TOKENS:]
        return tokenizer.decode([*context, *tokens])[len(tokenizer.decode(context)) :]

    def has_stopped(row: int, tokens: list[int]) -> bool:
        text = text_after(prompts[row], tokens)
        return text_until(text, request.stop) != text

    start = time.perf_counter()
    written = generate(
        model,
        prompts,
        request.max_new_tokens,
        end_tokens=saved.tokens.stops,
        sampler=Sampler(request.temperature, request.top_p, request.seed),
        on_token=has_stopped if request.stop else None,
    )
    read = sum(map(len, prompts))
    new = sum(map(len, written))
    log.info("%d tokens read, %d written in %.1f s", read, new, time.perf_counter() - start)
    texts = []
    for prompt, tokens in zip(prompts, written, strict=True):
        # Not every tokenizer calls the end token a special one, which its decoder leaves out.
        kept = [token for token in tokens if token not in saved.tokens.stops]
        texts.append(text_until(text_after(prompt, kept), request.stop))
    return texts
