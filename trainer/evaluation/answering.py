"""Greedy answers to prompts; a prefix that prompts share is read once.

Prompts of a group, such as one text with a needle at several depths, share a prefix with the
deepest of them, the trunk. The trunks of many groups are read first. Then as many prompts at a time
are read from where they leave their trunks, in a copy of the trunks' keys and values.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.data.tokenizer import special_tokens
from trainer.evaluation.scoring import Prompt, Stop
from trainer.model.cache import KVCache
from trainer.model.generate import generate, read_prompts, read_rows
from trainer.model.language_model import LanguageModel


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
    read together (at least one prompt); the cache holds at most twice as many. ``never_first``:
    tokens that cannot begin an answer; with any, the end of a text or turn cannot either.
    """
    texts: dict[int, str] = {}
    ends = model.end_tokens or special_tokens(tokenizer).stops
    for groups in batches(prompts, batch_tokens):
        for indices, logits, cache in _read(model, prompts, groups, batch_tokens):
            if never_first:
                logits[:, [*never_first, *ends]] = -torch.inf
            batch = [prompts[index] for index in indices]

            def is_complete(row: int, new: list[int], batch: list[Prompt] = batch) -> bool:
                return stop is not None and stop(tokenizer.decode(new), batch[row].answers)

            generated = generate(
                model,
                [prompt.tokens for prompt in batch],
                batch[0].new_tokens,
                end_tokens=ends,
                on_token=is_complete,
                read=(logits, cache),
            )
            for index, tokens in zip(indices, generated, strict=True):
                texts[index] = tokenizer.decode([token for token in tokens if token not in ends])
    return [texts[index] for index in range(len(prompts))]


def _read(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[int]],
    batch_tokens: int,
) -> Iterator[tuple[list[int], Tensor, KVCache]]:
    """Read the prompts of a batch.

    Yields:
        Indices of prompts, the logits ``[B, vocab]`` after them, and a cache that holds them.
    """
    trunks = [group[0] for group in groups]
    count = prompts[trunks[0]].new_tokens
    length = len(prompts[trunks[0]].tokens)
    if all(len(group) == 1 for group in groups):
        yield trunks, *read_prompts(model, [prompts[index].tokens for index in trunks], count)
        return
    ids = {index: np.array(prompts[index].tokens) for index in chain.from_iterable(groups)}

    def tokens(indices: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.stack([ids[index] for index in indices])).to(model.device)

    def shared(trunk: int, index: int) -> int:
        # Every prompt must read at least one token after the trunk.
        return int(np.append(ids[trunk][:-1] != ids[index][:-1], True).argmax())

    # Tokens shared with a trunk, the trunk's row, and the prompt; the longest shares first.
    shares = []
    for row, group in enumerate(groups):
        shares += [(shared(group[0], index), row, index) for index in group]
    shares.sort(reverse=True)
    most = max(1, 2 * batch_tokens // (length + count) - len(groups))
    trunk = copies = model.empty_cache(len(groups), length + count - 1)
    # A single row needs no copy: each prompt shares fewer tokens with it than the one before.
    # If the layout changes while an answer grows, all its tokens are read again.
    if len(groups) > 1 or most > 1 or model.layout.switches:
        copies = model.empty_cache(min(most, len(shares)), length + count - 1)
    read_rows(model, tokens(trunks)[:, :-1], trunk, length)
    for first in range(0, len(shares), most):
        chunk = shares[first : first + most]
        cache = copies.part(0, len(chunk))
        logits: list[Tensor] = []
        for begin in range(0, len(chunk), len(groups)):
            cuts, rows, indices = zip(*chunk[begin : begin + len(groups)], strict=True)
            cut = cuts[-1]  # the shortest prefix of these
            part = cache.part(begin, len(rows))
            part.copy_from(trunk, cut, rows)
            states = read_rows(model, tokens(indices)[:, cut:], part, length)
            logits.append(model.logits(states)[:, 0])
        cache.fill((), length)
        yield [index for _, _, index in chunk], torch.cat(logits), cache


def batches(prompts: Sequence[Prompt], batch_tokens: int) -> Iterator[list[list[int]]]:
    """Yield batches that contain the index of every prompt once, in lists of those that share a
    prefix with the first of the list, their trunk.

    The prompts of a batch have equally long answers. If any share a prefix, all are equally long.
    """
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        # A prompt without a group is alone in one.
        group = -1 - index if prompt.group is None else prompt.group
        groups[group, len(prompt.tokens), prompt.new_tokens].append(index)
    by_lengths: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for (_, length, new), members in groups.items():
        # The deepest one shares the longest prefixes with the others.
        members.sort(key=lambda index: -(prompts[index].depth or 0.0))
        shared_length = length if len(members) > 1 else 0
        by_lengths[new, shared_length].append(members)
    for (new, _), same in sorted(by_lengths.items(), reverse=True):
        remaining = sorted(same, key=lambda group: -len(prompts[group[0]].tokens))
        while remaining:
            size = max(1, batch_tokens // (len(prompts[remaining[0][0]].tokens) + new))
            yield remaining[:size]
            remaining = remaining[size:]
