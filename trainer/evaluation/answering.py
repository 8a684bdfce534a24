"""Greedy answers to prompts; a prefix that prompts share is read once.

Prompts of a group, such as one text with a needle at several depths, share a prefix. The prompt
that has most in common with the others, the trunk, is read first. The others continue from a copy
of its keys and values, up to where they diverge. Groups are read in one batch, and all their
prompts then grow together. If only one prompt fits, those of a group are answered in turn, each in
the place of the one before. All other prompts go to :func:`generate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.data.order import Integers
from trainer.data.tokenizer import end_tokens
from trainer.evaluation.passes import WHOLE, Piece, longest_first, part_of, sequences_at_once
from trainer.evaluation.scoring import Prompt, Stop
from trainer.model.cache import KVCache
from trainer.model.flops import forward_flops
from trainer.model.generate import continue_from_cache, generate
from trainer.model.language_model import LanguageModel

WORTH_SHARING = 0.15
"""Least share of tokens that sharing must save; a slightly smaller pass costs about as much."""
ENOUGH = {"cpu": 1e9, "cuda": 1e12}
"""Operations that take about as long as the shortest forward pass. Smaller passes are joined, at
the price of reading some tokens of the trunk again."""


@dataclass(frozen=True)
class _Batch:
    """Prompts to answer together, by index.

    ``cuts``: positions, ascending, at which prompts diverge from the trunk of their group; empty if
    nothing is shared. Otherwise ``prompts`` lists the prompt of each group that diverges at
    ``cuts[0]``, then one of each group for the next cut, and so on, and finally the trunks.
    ``in_turn``: whether the prompts, of one group, are answered one after the other.
    """

    prompts: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    in_turn: bool = False


@torch.no_grad()
def answers(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    batch_tokens: int,
    stop: Stop | None = None,
    part: Piece = WHOLE,
) -> dict[int, str]:
    """Return the model's answers by the indices of their prompts, as if each were computed alone.

    An answer ends at end-of-text or the end of a turn, after its prompt's ``new_tokens``, or when
    ``stop``, called after each of its tokens, returns True. ``batch_tokens``: most prompt tokens
    read and cached together (at least one prompt). ``part``: the part of the batches to answer.
    """
    texts: dict[int, str] = {}
    ends = model.end_tokens or end_tokens(tokenizer)
    for batch in part_of(list(_batches(prompts, batch_tokens)), part):
        asked = [prompts[index] for index in batch.prompts]
        answered: list[list[int]] = [[] for _ in asked]

        def on_token(row: int, token: int, asked: Any = asked, answered: Any = answered) -> bool:
            answered[row].append(token)
            return stop is not None and stop(tokenizer.decode(answered[row]), asked[row].answers)

        answer = _answer_in_turn if batch.in_turn else _answer
        answer(model, asked, batch.cuts, ends, on_token)
        for index, tokens in zip(batch.prompts, answered, strict=True):
            has_ended = not ends.isdisjoint(tokens[-1:])
            texts[index] = tokenizer.decode(tokens[:-1] if has_ended else tokens)
    return texts


def _answer(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    cuts: Sequence[int],
    ends: frozenset[int],
    on_token: Callable[[int, int], bool],
) -> None:
    """Answer greedily; all prompts have the same limits on length and first token."""
    tokens, count = [prompt.tokens for prompt in prompts], prompts[0].new_tokens
    if cuts:
        states, cache = read_sharing(model, tokens, cuts, count - 1, last=1)
        logits = model.logits(states)[:, 0]
        continue_from_cache(model, logits, cache, tokens, count, end_tokens=ends, on_token=on_token)
    elif count == 1 and not prompts[0].never_first and len(set(map(len, tokens))) == 1:
        # No token follows, so nothing needs to be cached.
        ids = torch.tensor(tokens, device=model.device)
        parts = ids.split(sequences_at_once(model, ids.shape[1], ids.numel()))
        likeliest = torch.cat([model(part, last=1)[:, 0].argmax(dim=-1) for part in parts])
        for row, token in enumerate(likeliest.tolist()):
            on_token(row, token)
    else:
        first = prompts[0].never_first and {*prompts[0].never_first, *ends}
        generate(model, tokens, count, end_tokens=ends, never_first=first, on_token=on_token)


def _answer_in_turn(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    cuts: Sequence[int],
    ends: frozenset[int],
    on_token: Callable[[int, int], bool],
) -> None:
    """Answer greedily the prompts of one group: the trunk, then the one that shares most with it.

    Each overwrites the cache from its cut on, so what the next one shares is still there.
    """
    length, count = len(prompts[0].tokens), prompts[0].new_tokens
    cache = model.empty_cache(1, length + count - 1)
    if any(length <= switch < length + count for switch in model.layout.switches):
        cuts = [0] * len(cuts)  # each answer overwrites all of the cache
    for row, cut in reversed([*enumerate(cuts), (len(cuts), 0)]):
        alone = cache.part(0, 1, 0)
        alone.fill((), cut)
        ids = torch.tensor([prompts[row].tokens[cut:]], device=model.device)
        logits = model(ids, cache=alone, last=1)[:, 0]

        def on_its_token(_: int, token: int, row: int = row) -> bool:
            return on_token(row, token)

        read = [prompts[row].tokens]
        continue_from_cache(
            model, logits, alone, read, count, end_tokens=ends, on_token=on_its_token
        )


def read_sharing(
    model: LanguageModel, tokens: Sequence[Sequence[int]], cuts: Sequence[int], new: int, last: int
) -> tuple[Tensor, KVCache]:
    """Read sequences of equal length; those of a group share their beginning, which is read once.

    Args:
        model: the model.
        tokens: sequences in the order of :class:`_Batch`, the trunks at the end.
        cuts: positions, ascending, at which the sequences of a group leave its trunk; not empty.
        new: tokens that will follow, for which the cache has room.
        last: number of last positions whose states are returned, all of them behind the cuts.

    Returns:
        States ``[B, last, hidden]`` before the head, and the cache.
    """
    length = len(tokens[0])
    groups = len(tokens) // (len(cuts) + 1)
    cache = model.empty_cache(len(tokens), length + new)
    ids = torch.tensor(tokens, device=model.device)
    trunk = cache.part(len(tokens) - groups, groups, 0)
    trunk_states = model.prefilled(ids[-groups:], cache=trunk, last=last)
    states = []
    operations_per_token = forward_flops(model.config, model.layout, length) / length
    enough = ENOUGH.get(model.device.type, 0) / operations_per_token
    for first, count in _stages(cuts, groups, length, enough):
        cut, begin, end = cuts[first], first * groups, (first + count) * groups
        branches = cache.part(begin, end - begin, 0)
        for copy, read in zip(branches.layers, trunk.layers, strict=True):
            copy.append(*(x[:, :, :cut].repeat(count, 1, 1, 1) for x in (read.keys, read.values)))
        states.append(model.prefilled(ids[begin:end, cut:], cache=branches, last=last))
    cache.fill((), length)
    return torch.cat([*states, trunk_states]), cache


def _stages(cuts: Sequence[int], groups: int, length: int, enough: float) -> list[tuple[int, int]]:
    """Return (first, number) of consecutive cuts to read together.

    Equal cuts share a stage, and every stage but the last reads at least ``enough`` tokens.
    """
    stages: list[tuple[int, int]] = []
    for index in range(len(cuts)):
        first, count = stages[-1] if stages else (0, 0)
        is_small = count * groups * (length - cuts[first]) < enough
        if stages and (is_small or cuts[index] == cuts[first]):
            stages[-1] = first, count + 1
        else:
            stages.append((index, 1))
    return stages


def _batches(prompts: Sequence[Prompt], batch_tokens: int) -> Iterator[_Batch]:
    """Yield batches that contain every prompt once; groups that benefit share a batch."""
    alike: dict[tuple[int | None, int, int], list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        alike[prompt.group, len(prompt.tokens), prompt.new_tokens].append(index)
    single: dict[int, list[int]] = defaultdict(list)  # by new tokens
    sharing: dict[tuple[int, int, int], list[tuple[list[int], Integers]]] = defaultdict(list)
    for (group, length, new), members in alike.items():
        if group is None or len(members) == 1 or prompts[members[0]].never_first:
            single[new] += members
            continue
        fit = batch_tokens // (length + new)
        in_turn = fit < 2
        # Prompts with similar depths share the longest prefixes.
        members.sort(key=lambda index: prompts[index].depth or 0.0)
        for part in np.array_split(members, 1 if in_turn else -(-len(members) // fit)):
            order, cuts = _cuts([prompts[index].tokens for index in part])
            if cuts.sum() < WORTH_SHARING * length * len(part):
                single[new] += part.tolist()
            elif in_turn:
                yield _Batch(tuple(part[order].tolist()), tuple(cuts.tolist()), in_turn)
            else:
                sharing[length, new, len(part)].append((part[order].tolist(), cuts))
    for new, indices in sorted(single.items(), reverse=True):
        lengths = [len(prompts[index].tokens) + new for index in indices]
        for batch in longest_first(lengths, batch_tokens):
            yield _Batch(tuple(indices[place] for place in batch))
    for (length, new, size), groups in sharing.items():
        count = max(1, batch_tokens // (size * (length + new)))
        for first in range(0, len(groups), count):
            chosen = groups[first : first + count]
            rows = np.array([order for order, _ in chosen]).T.flatten()
            cuts = np.min([cuts for _, cuts in chosen], axis=0)
            yield _Batch(tuple(rows.tolist()), tuple(cuts.tolist()))


def _cuts(tokens: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """Order prompts ``[n, L]`` by where they diverge from the last one, the trunk.

    Returns that order and the positions ``[n - 1]``, which leave at least one token to read.
    """
    ids = np.array(tokens)
    differs = ids[:-1] != ids[-1]
    differs[:, -1] = True
    cuts = differs.argmax(axis=1)
    order = cuts.argsort(kind="stable")
    return np.append(order, len(ids) - 1), cuts[order]
