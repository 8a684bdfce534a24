"""Greedy answers to prompts; a prefix that prompts share is read once.

Prompts of a group, such as one text with a needle at several depths, share a prefix with the
deepest of them, the trunk. The trunks of many groups are read first. Then each prompt is read from
where it leaves its trunk, in a copy of the trunk's keys and values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.data.tokenizer import special_tokens
from trainer.evaluation.scoring import Prompt, Stop
from trainer.model.cache import KVCache
from trainer.model.generate import continue_from_cache, read_prompts, read_rows
from trainer.model.language_model import LanguageModel

Groups = Sequence[Sequence[int]]
"""Indices of prompts that share a prefix with the first of them, the trunk of their group."""
Read = tuple[list[int], Tensor, KVCache]
"""Indices of prompts, the logits ``[B, vocab]`` after them, and a cache that holds them."""


@torch.no_grad()
def answers(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    batch_tokens: int,
    stop: Stop | None = None,
    never_first: Collection[int] = (),
) -> list[str]:
    """Return the model's answers to prompts, as if each were computed alone.

    An answer ends at end-of-text or the end of a turn, after its prompt's ``new_tokens``, or when
    ``stop``, called after each of its tokens, returns True. ``batch_tokens``: most prompt tokens
    read together (at least one prompt); the cache holds at most twice as many.
    ``never_first``: tokens that cannot begin an answer; if there are any, the end of a text or turn
    cannot either.
    """
    texts: dict[int, str] = {}
    ends = model.end_tokens or special_tokens(tokenizer).stops
    for batch in batches(prompts, batch_tokens):
        for indices, logits, cache in _read(model, prompts, batch, batch_tokens):
            if never_first:
                logits[:, [*never_first, *ends]] = -torch.inf
            asked = [prompts[index] for index in indices]

            def is_complete(row: int, new: list[int], asked: list[Prompt] = asked) -> bool:
                return stop is not None and stop(tokenizer.decode(new), asked[row].answers)

            answered = continue_from_cache(
                model,
                logits,
                cache,
                [prompt.tokens for prompt in asked],
                asked[0].new_tokens,
                end_tokens=ends,
                on_token=is_complete,
            )
            for index, tokens in zip(indices, answered, strict=True):
                has_ended = not ends.isdisjoint(tokens[-1:])
                texts[index] = tokenizer.decode(tokens[:-1] if has_ended else tokens)
    return [texts[index] for index in range(len(prompts))]


def _read(
    model: LanguageModel, prompts: Sequence[Prompt], groups: Groups, batch_tokens: int
) -> Iterator[Read]:
    """Read the prompts of a batch; its trunks and the prompts read from them fit the cache."""
    trunks = [group[0] for group in groups]
    count, length = prompts[trunks[0]].new_tokens, len(prompts[trunks[0]].tokens)
    if all(len(group) == 1 for group in groups):
        yield trunks, *read_prompts(model, [prompts[index].tokens for index in trunks], count)
        return

    def ids(indices: Sequence[int], first: int, last: int | None = None) -> Tensor:
        tokens = np.array([prompts[index].tokens[first:last] for index in indices])
        return torch.from_numpy(tokens).to(model.device)

    trunk = model.empty_cache(len(trunks), length + count - 1)
    # Without the last token: every prompt must read at least one token after the trunk.
    read_rows(model, ids(trunks, 0, -1), trunk, length=length)
    shares = [
        (_shared(prompts[group[0]], prompts[index]), row, index)
        for row, group in enumerate(groups)
        for index in group
    ]
    shares.sort()
    most = max(1, 2 * batch_tokens // (length + count) - len(trunks))
    # A single row stays in its place. It keeps the tokens that the next prompt shares with it,
    # unless the layout changes with the length and they are read again.
    in_place = len(trunks) == most == 1 and not model.layout.switches
    space = trunk if in_place else model.empty_cache(min(most, len(shares)), length + count - 1)
    for end in range(len(shares), 0, -most):
        chunk = shares[max(0, end - most) : end]
        logits: list[Tensor] = []
        first = 0
        while first < len(chunk):
            cut = chunk[first][0]
            size = min(len(trunks), model.sequences_at_once(length - cut, batch_tokens))
            _, rows, indices = zip(*chunk[first : first + size], strict=True)
            part = space.part(first, len(rows))
            if in_place:
                part.fill((), cut)
            else:
                part.copy_from(trunk, cut, rows)
            logits.append(model(ids(indices, cut), cache=part, length=length, last=1)[:, 0])
            first += size
        cache = space.part(0, len(chunk))
        cache.fill((), length)
        yield [index for _, _, index in chunk], torch.cat(logits), cache


def _shared(trunk: Prompt, prompt: Prompt) -> int:
    """Return how many first tokens are equal, which leaves at least one to read."""
    differs = np.array(trunk.tokens) != np.array(prompt.tokens)
    differs[-1] = True
    return int(differs.argmax())


def batches(prompts: Sequence[Prompt], batch_tokens: int) -> Iterator[Groups]:
    """Yield batches that contain every prompt once.

    The prompts of a batch have equally long answers. If they are in groups of several, they are
    equally long too.
    """
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        name = -1 - index if prompt.group is None else prompt.group
        groups[name, len(prompt.tokens), prompt.new_tokens].append(index)
    single: dict[int, list[list[int]]] = defaultdict(list)  # by new tokens
    sharing: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for (_, length, new), members in groups.items():
        # The deepest one shares the longest prefixes with the others.
        members.sort(key=lambda index: -(prompts[index].depth or 0.0))
        (single[new] if len(members) == 1 else sharing[length, new]).append(members)
    for alike in [*(single[new] for new in sorted(single, reverse=True)), *sharing.values()]:
        left = sorted(alike, key=lambda group: -len(prompts[group[0]].tokens))
        while left:
            longest = prompts[left[0][0]]
            tokens = len(longest.tokens) + longest.new_tokens
            # Half as many groups of several: their prompts are read from copies of the trunks.
            size = max(1, batch_tokens // (tokens if len(left[0]) == 1 else 2 * tokens))
            yield left[:size]
            left = left[size:]
