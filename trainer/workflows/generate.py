"""Text from a finished model: a single continuation streams, several appear when complete."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from trainer.common.processes import usual_threads
from trainer.common.ranks import best_precision, device_type
from trainer.config import GenerationRequest
from trainer.model.generate import Sampler, TextStream, generate
from trainer.runs.models import find_model

log = logging.getLogger(__name__)


def continue_prompts(request: GenerationRequest, show: Callable[[str], None]) -> list[str]:
    """Continue the prompts with the checkpoint; return the continuations.

    ``show`` gets pieces of a single continuation while it grows.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    torch.set_num_threads(usual_threads())
    saved = find_model(request.checkpoint)
    device = device_type()
    model = saved.for_inference(device, best_precision(device))
    tokenizer = saved.tokens.tokenizer
    bos = [] if saved.tokens.first is None else [saved.tokens.first]
    prompts = [
        [*bos, *tokenizer.encode(text, add_special_tokens=False).ids] for text in request.prompts
    ]
    texts = [TextStream(tokenizer, request.stop) for _ in prompts]
    streams = len(prompts) == 1
    start = time.perf_counter()

    def on_token(row: int, new_tokens: list[int]) -> bool:
        new = texts[row].push(new_tokens[-1])
        if streams:
            show(new)
        return texts[row].stopped

    written = generate(
        model,
        prompts,
        request.max_new_tokens,
        end_tokens=saved.tokens.stops,
        sampler=Sampler(request.temperature, request.top_p, request.seed),
        on_token=on_token,
    )
    rests = [text.finish() for text in texts]
    if streams:
        show(f"{rests[0]}\n")
    read, new = sum(map(len, prompts)), sum(map(len, written))
    log.info("%d tokens read, %d written in %.1f s", read, new, time.perf_counter() - start)
    return [text.text for text in texts]
