"""Text from a finished model: a single continuation streams, several appear when complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from trainer.common.processes import usual_threads
from trainer.config import GenerationRequest
from trainer.data.tokenizer import end_tokens
from trainer.model.generate import TextStream, generate
from trainer.model.language_model import LanguageModel
from trainer.runs.fitted_temperature import with_fitted_temperature
from trainer.runs.models import find_candidate
from trainer.workflows.subjects import subject_of


@dataclass(frozen=True)
class Continuations:
    """Continuations of each prompt, and how fast they were made."""

    texts: tuple[str, ...]
    read: int
    """Tokens of all prompts."""
    written: int
    """Tokens of all continuations."""
    read_seconds: float
    """Seconds until every prompt had its first new token."""
    write_seconds: float
    """Seconds from then to the end."""
    ended: int = 0
    """Number of continuations that end-of-text or the end of a turn ended."""

    def speed(self) -> str:
        """Describe tokens and tokens per second of reading the prompts and of writing, and what
        ended the text if that was the end-of-text token."""
        tokens = "1 token" if self.read == 1 else f"{self.read} tokens"
        text = f"{tokens} read, {self.read / self.read_seconds:,.0f} a second"
        text += f"; {self.written} written"
        if (later := self.written - len(self.texts)) > 0:
            text += f", {later / self.write_seconds:,.1f} a second"
        if self.ended:
            texts = len(self.texts)
            which = f"{self.ended} of {texts} texts" if texts > 1 else "the text"
            text += f"; the end-of-text token ended {which}"
        return text


def continue_prompts(
    request: GenerationRequest, show: Callable[[str], None], say: Callable[[str], None]
) -> Continuations:
    """Continue the prompts with the checkpoint.

    ``show`` gets pieces of a single continuation if the request streams; ``say`` gets remarks on
    the model before the first token.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    torch.set_num_threads(usual_threads())
    candidate = find_candidate(str(request.checkpoint))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = subject_of(candidate, request.dtype, device).load()
    model.layout, temperature = with_fitted_temperature(model.layout, candidate.path)
    names = dict.fromkeys((candidate.name, candidate.path.name))  # an export has one name
    say(f"{', '.join(names)}{temperature}")
    return write(model, candidate.tokenizer, candidate.bos_token, request, show)


def write(
    model: LanguageModel,
    tokenizer: Tokenizer,
    bos_token: int | None,
    request: GenerationRequest,
    show: Callable[[str], None],
) -> Continuations:
    """Continue the prompts, each after ``bos_token`` if there is one."""
    bos = [] if bos_token is None else [bos_token]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in request.prompts]
    ids = [[*bos, *tokens] for tokens in encoded]
    texts = [TextStream(tokenizer, request.stop) for _ in ids]
    stream = request.stream and len(ids) == 1
    times: list[float] = [time.perf_counter()]

    def on_token(row: int, token: int) -> bool:
        new = texts[row].push(token)
        if stream:
            show(new)
        times.append(time.perf_counter())
        return texts[row].stopped

    ends = model.end_tokens or end_tokens(tokenizer)
    new = generate(
        model,
        ids,
        request.max_new_tokens,
        sampling=request.sampling,
        end_tokens=ends,
        on_token=on_token,
    )
    rests = [text.finish() for text in texts]
    if stream:
        show(rests[0])
    return Continuations(
        texts=tuple(text.text for text in texts),
        read=sum(map(len, ids)),
        written=sum(map(len, new)),
        read_seconds=times[len(ids)] - times[0],
        write_seconds=times[-1] - times[len(ids)],
        ended=sum(tokens[-1] in ends for tokens in new),
    )
