"""Greedy answers to prompts; a prefix that prompts share is read once.

Prompts of a group, such as one text with a needle at several depths, share a prefix with the
deepest of them, the trunk. The trunk is read first. Then each prompt is read from where it leaves
the trunk, in a copy of its keys and values. A batch holds many groups and reads one prompt of each
at a time, in as many rounds as a group has prompts. Prompts without a group go to
:func:`generate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.data.order import Integers
from trainer.data.tokenizer import special_tokens
from trainer.evaluation.scoring import Prompt, Stop
from trainer.model.cache import KVCache
from trainer.model.generate import continue_from_cache, generate
from trainer.model.language_model import LanguageModel

IN_CACHE = 2**18
"""Elements of a layer's input that fit in a processor's cache while the layer uses them."""
Round = tuple[int, Sequence[int]]
"""Tokens that prompts share with their trunks, and the indices of these prompts."""


@torch.no_grad()
def answers(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    batch_tokens: int,
    stop: Stop | None = None,
    part: slice = slice(None),
) -> dict[int, str]:
    """Return the model's answers by the indices of their prompts, as if each were computed alone.

    An answer ends at end-of-text or the end of a turn, after its prompt's ``new_tokens``, or when
    ``stop``, called after each of its tokens, returns True. ``batch_tokens``: most prompt tokens
    read together (at least one prompt); the cache holds at most twice as many. ``part``: the
    batches to answer.
    """
    texts: dict[int, str] = {}
    ends = model.end_tokens or special_tokens(tokenizer).stops
    for batch in list(_batches(prompts, batch_tokens))[part]:
        answered: dict[int, list[int]] = {index: [] for _, row in batch for index in row}

        def on_token(index: int, token: int, answered: dict[int, list[int]] = answered) -> bool:
            answered[index].append(token)
            text = answered[index]
            return stop is not None and stop(tokenizer.decode(text), prompts[index].answers)

        if len(batch) == 1:
            _answer_alone(model, prompts, batch[0][1], ends, on_token)
        else:
            _answer_groups(model, prompts, batch, batch_tokens, ends, on_token)
        for index, tokens in answered.items():
            has_ended = not ends.isdisjoint(tokens[-1:])
            texts[index] = tokenizer.decode(tokens[:-1] if has_ended else tokens)
    return texts


def _answer_alone(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    indices: Sequence[int],
    ends: frozenset[int],
    on_token: Callable[[int, int], bool],
) -> None:
    """Answer prompts that share nothing, with the same limits on length and first token."""
    first = prompts[indices[0]]
    generate(
        model,
        [prompts[index].tokens for index in indices],
        first.new_tokens,
        end_tokens=ends,
        never_first=first.never_first and {*first.never_first, *ends},
        on_token=lambda row, token: on_token(indices[row], token),
    )


def _answer_groups(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    rounds: Sequence[Round],
    batch_tokens: int,
    ends: frozenset[int],
    on_token: Callable[[int, int], bool],
) -> None:
    """Answer the prompts of groups, in turn unless several of each fit ``batch_tokens``."""
    _, trunks = rounds[0]
    rows, length = len(trunks), len(prompts[trunks[0]].tokens)
    count = prompts[trunks[0]].new_tokens
    trunk = model.empty_cache(rows, length + count - 1)
    ids = torch.tensor([prompts[index].tokens for index in trunks], device=model.device)
    # The last token stays out, so that every prompt has one to read by itself.
    _read(model, ids[:, :-1], trunk, 0, length)
    together = max(1, batch_tokens // (rows * (length + count)))
    # A single row stays in its place. It keeps the tokens that the next prompt shares with it,
    # unless the layout changes with the length and they are read again.
    in_place = rows == together == 1 and not model.layout.switches
    for first in range(0, len(rounds), together):
        chosen = rounds[first : first + together]
        indices = [index for _, of_round in chosen for index in of_round]
        tokens = [prompts[index].tokens for index in indices]
        cache = trunk if in_place else model.empty_cache(len(tokens), length + count - 1)
        logits = []
        for place, (cut, of_round) in enumerate(chosen):
            part = cache.part(place * rows, rows, 0)
            begin_with(part, trunk, cut)
            ids = torch.tensor([prompts[i].tokens[cut:] for i in of_round], device=model.device)
            logits.append(_read(model, ids, part, cut, length))
        cache = cache.part(0, len(tokens), 0)
        cache.fill((), length)

        def on_row(row: int, token: int, indices: Sequence[int] = indices) -> bool:
            return on_token(indices[row], token)

        continue_from_cache(
            model, torch.cat(logits), cache, tokens, count, end_tokens=ends, on_token=on_row
        )


def _read(model: LanguageModel, ids: Tensor, cache: KVCache, cut: int, length: int) -> Tensor:
    """Read tokens ``[B, T]`` after the first ``cut`` in the cache; return the logits ``[B, vocab]``
    after the last one. A pass has as many rows as :func:`sequences_at_once` says.

    ``length``: of the whole prompts, which frequencies may follow.
    """
    size, logits = sequences_at_once(model, ids.shape[1], ids.numel()), []
    for first in range(0, len(ids), size):
        rows = cache.part(first, size, 0)
        rows.fill((), cut)
        logits.append(model(ids[first : first + size], cache=rows, length=length, last=1)[:, 0])
    return torch.cat(logits)


def sequences_at_once(model: LanguageModel, length: int, batch_tokens: int) -> int:
    """Return the number of sequences of ``length`` tokens in a forward pass.

    It is at least one, and otherwise at most ``batch_tokens`` tokens in all. On a CPU, the batch
    must also fit in the caches: a larger one is bound by memory bandwidth.
    """
    if model.device.type == "cpu":
        batch_tokens = min(batch_tokens, IN_CACHE // model.config.hidden_size)
    return max(1, batch_tokens // length)


def begin_with(
    cache: KVCache, trunk: KVCache, cut: int, rows: Sequence[int] | slice = slice(None)
) -> None:
    """Fill an empty cache with the first ``cut`` tokens of ``rows`` of ``trunk``, default all."""
    for layer, read in zip(cache.layers, trunk.layers, strict=True):
        layer.keys[:, :, :cut] = read.keys[rows, :, :cut]
        layer.values[:, :, :cut] = read.values[rows, :, :cut]
    cache.fill((), cut)


def _batches(prompts: Sequence[Prompt], batch_tokens: int) -> Iterator[list[Round]]:
    """Yield batches that contain every prompt once.

    A batch of single prompts is one round. A batch of groups has a round for each prompt of a
    group, in an order in which each shares no more with the trunk than the one before.
    """
    groups: dict[tuple[int | None, int, int], list[int]] = defaultdict(list)
    single: dict[int, list[int]] = defaultdict(list)  # by new tokens
    for index, prompt in enumerate(prompts):
        if prompt.group is None or prompt.never_first:
            single[prompt.new_tokens].append(index)
        else:
            groups[prompt.group, len(prompt.tokens), prompt.new_tokens].append(index)
    sharing: dict[tuple[int, int, int], list[list[int]]] = defaultdict(list)
    for (_, length, new), members in groups.items():
        if len(members) == 1:
            single[new] += members
        else:
            sharing[length, new, len(members)].append(members)
    for new, indices in sorted(single.items(), reverse=True):
        left = sorted(indices, key=lambda index: -len(prompts[index].tokens))
        while left:
            size = max(1, batch_tokens // (len(prompts[left[0]].tokens) + new))
            yield [(0, left[:size])]
            left = left[size:]
    for (length, new, _), alike in sharing.items():
        count = max(1, batch_tokens // (length + new))
        for first in range(0, len(alike), count):
            ordered = [_from_the_trunk(prompts, group) for group in alike[first : first + count]]
            cuts = np.min([cuts for cuts, _ in ordered], axis=0).tolist()
            yield list(zip(cuts, zip(*(order for _, order in ordered), strict=True), strict=True))


def _from_the_trunk(prompts: Sequence[Prompt], group: Sequence[int]) -> tuple[Integers, list[int]]:
    """Order prompts of one length by how much they share with the deepest one, which is the first.

    Returns the numbers of shared tokens, which leave at least one token to read, and that order.
    """
    # The deepest one shares the longest prefixes with the others.
    by_depth = sorted(group, key=lambda index: -(prompts[index].depth or 0.0))
    ids = np.array([prompts[index].tokens for index in by_depth])
    differs = ids != ids[0]
    differs[:, -1] = True
    cuts = differs.argmax(axis=1)
    order = (-cuts).argsort(kind="stable")
    return cuts[order], [by_depth[place] for place in order]
