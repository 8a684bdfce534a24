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
    model = saved.for_inference(device, request.dtype or best_precision(device))
    tokenizer = saved.tokens.tokenizer
    bos = [] if saved.tokens.first is None else [saved.tokens.first]
    prompts = [
        [*bos, *tokenizer.encode(text, add_special_tokens=False).ids] for text in request.prompts
    ]
    texts = [TextStream(tokenizer, request.stop) for _ in prompts]
    streams = len(prompts) == 1
    times = [time.perf_counter()]

    def on_token(row: int, new_tokens: list[int]) -> bool:
        new = texts[row].push(new_tokens[-1])
        if streams:
            show(new)
        times.append(time.perf_counter())
        return texts[row].stopped

    generate(
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
    # The first token of every prompt comes with reading it.
    read, later = sum(map(len, prompts)), len(times) - 1 - len(prompts)
    reading, writing = times[len(prompts)] - times[0], times[-1] - times[len(prompts)]
    speed = f"{read} tokens read, {read / reading:,.0f} a second; {len(times) - 1} written"
    log.info("%s", speed + (f", {later / writing:,.1f} a second" if later else ""))
    return [text.text for text in texts]
