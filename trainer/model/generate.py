"""Generate continuations of prompts of any lengths with a key-value cache."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from trainer.model.cache import KVCache
from trainer.model.language_model import LanguageModel

OnToken = Callable[[int, list[int]], bool | None]
"""Receives a prompt's index and all its new tokens; True ends the sequence."""


def text_until(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the ``stops``, or all of it."""
    return min((text.partition(stop)[0] for stop in stops), key=len, default=text)


@dataclass
class Sampler:
    """Sampler of tokens, with one random generator per sequence.

    ``temperature`` divides the logits; 0 takes the most likely token. ``top_p`` draws from the
    smallest set of most likely tokens with that total probability (Holtzman et al. 2020). Row r
    draws from a generator seeded with ``seed + r``, so that it does not depend on the other rows.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    generators: dict[int, torch.Generator] = field(default_factory=dict, init=False)

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Draw a token id ``[B]`` for each sequence, from logits ``[B, vocab]`` of ``rows``."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        for row in {*rows} - self.generators.keys():
            self.generators[row] = torch.Generator().manual_seed(self.seed + row)
        draws = [torch.rand((1,), generator=self.generators[row]) for row in rows]
        # float64: in float32 the cumulative sum of a large vocabulary may end below a draw.
        p = (logits.double() / self.temperature).softmax(dim=-1)
        order = None
        if self.top_p < 1:
            p, order = p.sort(dim=-1, descending=True, stable=True)
            excess = p.cumsum(dim=-1) - p >= self.top_p
            excess[:, 0] = False  # the likeliest token stays
            p = p.masked_fill(excess, 0)
        sums = p.cumsum(dim=-1)
        chosen = torch.searchsorted(sums, torch.stack(draws).to(sums) * sums[:, -1:], right=True)
        if order is not None:
            chosen = order.gather(-1, chosen)
        return chosen[:, 0]


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampler: Sampler | None = None,
    end_tokens: Collection[int] = (),
    on_token: OnToken | None = None,
    read: tuple[Tensor, KVCache] | None = None,
) -> list[list[int]]:
    """Continue every prompt independently of the others.

    All sequences grow by one token per step, and finished ones leave the batch. A sequence that
    grows beyond a length at which all frequencies switch (LongRoPE) is read again, since deeper
    layers' keys and values come from states of the other frequencies.

    Args:
        sampler: draws the tokens; None: takes the most likely ones.
        end_tokens: tokens that end a sequence.
        on_token: called with a prompt's index and its new tokens after each of them; returning True
            ends that sequence.
        read: logits ``[B, vocab]`` after the prompts, and a cache that holds them with room for
            ``max_new_tokens - 1`` more, which is consumed; None: see :func:`read_prompts`.

    Returns:
        The new tokens of each prompt, including the end token.

    Raises:
        ValueError: a prompt is empty.
    """
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt must have at least one token")
    if not prompts or max_new_tokens < 1:
        return [[] for _ in prompts]
    logits, cache = read_prompts(model, prompts, max_new_tokens) if read is None else read
    rows = list(range(len(prompts)))
    new: list[list[int]] = [[] for _ in rows]
    sampler = sampler or Sampler()
    switches = model.layout.switches
    for step in range(1, max_new_tokens + 1):
        tokens = sampler(logits, rows).tolist()
        growing = []
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            new[row].append(token)
            stops = on_token is not None and on_token(row, new[row])
            if not stops and token not in end_tokens:
                growing.append(place)
        if step == max_new_tokens or not growing:
            break
        rows = [rows[place] for place in cache.keep(growing)]
        ids = torch.tensor([new[row][-1:] for row in rows], device=logits.device)
        logits = model(ids, cache=cache)[:, 0]
        for place, row in enumerate(rows):
            length = len(prompts[row]) + len(new[row])
            if length - 1 in switches:
                again = cache.part(place, 1, cache.length - length)
                ids = torch.tensor([[*prompts[row], *new[row]]], device=logits.device)
                logits[place] = model(ids, cache=again, last=1)[0, 0]
    return new


@torch.no_grad()
def read_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[Tensor, KVCache]:
    """Return the logits ``[B, vocab]`` after the prompts, and a cache that holds them.

    The last new token is never read. Neighbours of equal length are read together, without padding.
    """
    longest = max(map(len, prompts))
    cache = model.empty_cache(len(prompts), longest + max_new_tokens - 1)
    logits: list[Tensor] = []
    first = 0
    for length, alike in groupby(prompts, key=len):
        ids = torch.tensor(list(alike), device=model.device)
        states = read_rows(model, ids, cache.part(first, len(ids), longest - length))
        logits.append(model.logits(states)[:, 0])
        first += len(ids)
    cache.fill(tuple(longest - len(prompt) for prompt in prompts), longest)
    return torch.cat(logits), cache


def read_rows(
    model: LanguageModel, ids: Tensor, cache: KVCache, length: int | None = None, *, last: int = 1
) -> Tensor:
    """Read ``[B, T]`` tokens after what a cache holds.

    Returns:
        States ``[B, last, hidden_size]`` of the last tokens.
    """

    def read(part: slice) -> Tensor:
        rows = cache.part(part.start, part.stop - part.start)
        rows.fill(rows.begins, cache.length)
        return model.prefilled(ids[part], cache=rows, length=length, last=last)

    states = model.in_passes(read, ids, ids.numel())
    cache.fill(cache.begins, cache.length + ids.shape[1])
    return states
