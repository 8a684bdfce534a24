"""Log-likelihoods of continuations; a prefix that requests share is read once.

Contexts and continuations become tokens, truncated as in lm-eval's ``hf`` model.
Rows of similar length are read together, padded on the right, which causal models do not see.
Several continuations of one context continue from its keys and values. Only states that predict a
continuation pass through the head, in chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.progress import Progress
from trainer.data.tokenizer import end_of_text, own_first_token
from trainer.model.cache import KVCache
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size

Pair = tuple[str, str]
"""A context and a continuation, a space between them belonging to the continuation."""


@dataclass(frozen=True)
class Request:
    """Request for the likelihood of the tokens ``continuation`` after the tokens ``context``.

    Neither is empty.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def within(self, max_length: int) -> Request:
        """Truncate the context for a model that reads ``max_length`` tokens.

        The last token is predicted and not read. A continuation is never truncated, and keeps one
        token before it.
        """
        room = max(1, max_length + 1 - len(self.continuation))
        return Request(self.context[-room:], self.continuation)


@dataclass(frozen=True)
class Encoder:
    """Encoder of text to requests.

    ``max_length``: maximum tokens of a forward pass; longer contexts lose their beginning.
    ``add_bos``: begin every context with end-of-text, as in training, unless the tokenizer itself
    adds a first token. ``eos``: see :func:`~trainer.data.tokenizer.end_of_text`.
    """

    tokenizer: Tokenizer
    max_length: int
    add_bos: bool = False
    eos: tuple[int, ...] = ()

    @cached_property
    def bos_token(self) -> int:
        """The token that stands for an empty context."""
        first = own_first_token(self.tokenizer)
        return self.end_of_text if first is None else first

    @cached_property
    def end_of_text(self) -> int:
        """The end-of-text token."""
        return end_of_text(self.tokenizer, self.eos)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of texts, with a beginning-of-text token if ``add_bos`` requires one."""
        adds_bos = self.add_bos and own_first_token(self.tokenizer) is None
        before = [self.bos_token] if adds_bos else []
        return [[*before, *encoding.ids] for encoding in self.tokenizer.encode_batch(list(texts))]

    def requests(self, pairs: Sequence[Pair]) -> list[Request]:
        """Encode context and continuation together, and split the tokens where the context ends.

        Raises:
            UserError: a continuation adds no token to its context.
        """
        moved = [_with_spaces_in_the_continuation(*pair) for pair in pairs]
        contexts = self.tokens([context for context, _ in moved])
        wholes = self.tokens([context + continuation for context, continuation in moved])
        requests = []
        for (text, continuation), context, whole in zip(moved, contexts, wholes, strict=True):
            if text:
                request = Request(tuple(context), tuple(whole[len(context) :]))
            else:
                request = self._after_nothing(continuation)
            if not request.continuation:
                raise UserError(f"{continuation!r} adds no token to {text!r}")
            requests.append(request.within(self.max_length))
        return requests

    def _after_nothing(self, text: str) -> Request:
        tokens = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
        has_bos = tokens[:1] == (self.bos_token,)
        return Request((self.bos_token,), tokens[1:] if has_bos else tokens)

    def windows(self, text: str) -> list[Request]:
        """Split a text into requests of ``max_length`` tokens that cover every token once.

        The first token is predicted from ``bos_token``; the last window is padded with context.
        """
        tokens = tuple(self.tokens([text])[0])
        if tokens[:1] != (self.bos_token,):
            tokens = (self.bos_token, *tokens)
        size = self.max_length
        return [
            Request(tokens[:start], tokens[start : start + size]).within(size)
            for start in range(1, len(tokens), size)
        ]


def _with_spaces_in_the_continuation(context: str, continuation: str) -> Pair:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


SHORTEST, ENOUGH = 0.75, 256
"""A row joins a batch of longer ones if it fills this share of their length, or if the batch has
fewer tokens than this: reading the weights then costs more than padding."""


@dataclass(frozen=True)
class Likelihood:
    """``log_likelihood`` of a continuation in nats; ``greedy``: whether no token is likelier."""

    log_likelihood: float
    greedy: bool


@dataclass(frozen=True)
class _Row:
    """Tokens to read.

    ``expected``: index of a request, and its tokens that the last tokens of this row predict.
    ``branches``: continuations from the end of the row.
    """

    tokens: tuple[int, ...]
    expected: tuple[tuple[int, tuple[int, ...]], ...]
    branches: tuple[_Row, ...] = ()


@torch.no_grad()
def log_likelihoods(
    model: LanguageModel, requests: Sequence[Request], batch_tokens: int, title: str | None = None
) -> list[Likelihood]:
    """Return the log-likelihood of every continuation, as if each were computed alone.

    ``batch_tokens``: tokens per forward pass, including cached ones (at least one row). ``title``:
    of the progress bar; None: show none.
    """
    if not requests:
        return []
    longest = max(len(r.context) + len(r.continuation) - 1 for r in requests)
    by_length = model.follows_length(longest)  # then rows cannot share keys
    rows = [_whole(i, r) for i, r in enumerate(requests)] if by_length else _rows(requests)
    total = sum(len(r.tokens) + sum(len(b.tokens) for b in r.branches) for r in rows)
    reader = _Reader(model, len(requests))
    with Progress(title or "", total, silent=title is None) as progress:
        progress.advance_to(0)
        for chosen in _batches([len(row.tokens) for row in rows], batch_tokens, by_length):
            batch = [rows[i] for i in chosen]
            if any(row.branches for row in batch):
                reader.read_with_branches(batch, batch_tokens)
            else:
                reader.read(batch)
            progress.advance_to(reader.tokens)
    return reader.results()


def _whole(index: int, request: Request) -> _Row:
    return _Row(request.context + request.continuation[:-1], ((index, request.continuation),))


def _rows(requests: Sequence[Request]) -> list[_Row]:
    """Return rows of contexts that several requests share, and rows of all other requests."""
    sharing: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        sharing[request.context].append(index)
    rows = []
    for context, indices in sharing.items():
        if len(indices) == 1:
            rows.append(_whole(indices[0], requests[indices[0]]))
            continue
        wanted = [(i, requests[i].continuation) for i in indices]
        first = tuple((i, tokens[:1]) for i, tokens in wanted)
        onward = (_Row(tokens[:-1], ((i, tokens[1:]),)) for i, tokens in wanted if tokens[1:])
        rows.append(_Row(context, first, tuple(onward)))
    return rows


def _batches(
    lengths: Sequence[int], tokens: int, by_length: bool, past: int = 0
) -> Iterator[list[int]]:
    """Yield indices of rows to read together, longest first; ``past``: tokens cached earlier."""
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        full = (len(batch) + 1) * (past + longest) > tokens
        if by_length:
            alike = length == longest
        else:
            alike = length >= SHORTEST * longest or len(batch) * longest < ENOUGH
        if batch and (full or not alike):
            yield batch
            batch = []
        if not batch:
            longest = length
        batch.append(index)
    if batch:
        yield batch


def _continued(
    model: LanguageModel, cache: KVCache, places: list[int], pasts: list[int], new: int
) -> KVCache:
    """Copy the rows ``places``, with ``pasts`` tokens each, into a cache with room for ``new``
    tokens."""
    longest = max(pasts)
    onward = model.empty_cache(len(places), longest + new)
    begins = tuple(longest - past for past in pasts)
    device = model.device
    rows = torch.tensor(places, device=device)[:, None]
    # Rows end in the same column; columns before a row's begin are never visible.
    columns = torch.arange(longest, device=device) - torch.tensor(begins, device=device)[:, None]
    columns.clamp_(min=0)
    for layer, read in zip(onward.layers, cache.layers, strict=True):
        layer.keys[:, :, :longest] = read.keys[rows, :, columns].transpose(1, 2)
        layer.values[:, :, :longest] = read.values[rows, :, columns].transpose(1, 2)
    onward.fill(begins, longest)
    return onward


class _Reader:
    """Reader of rows that sums their contributions to requests."""

    def __init__(self, model: LanguageModel, requests: int) -> None:
        self.model = model
        self.tokens = 0
        self.sums = torch.zeros(requests, dtype=torch.float64)
        self.missed = torch.zeros(requests, dtype=torch.bool)

    def results(self) -> list[Likelihood]:
        return [
            Likelihood(total, not missed)
            for total, missed in zip(self.sums.tolist(), self.missed.tolist(), strict=True)
        ]

    def read_with_branches(self, rows: list[_Row], batch_tokens: int) -> None:
        longest = len(rows[0].tokens)
        cache = self.model.empty_cache(len(rows), longest)
        self.read(rows, cache)
        places, branches = zip(
            *((place, branch) for place, row in enumerate(rows) for branch in row.branches),
            strict=True,
        )
        lengths = [len(branch.tokens) for branch in branches]
        for chosen in _batches(lengths, batch_tokens, by_length=False, past=longest):
            onto = [places[i] for i in chosen]
            pasts = [len(rows[place].tokens) for place in onto]
            onward = _continued(self.model, cache, onto, pasts, new=lengths[chosen[0]])
            self.read([branches[i] for i in chosen], onward)

    def read(self, rows: list[_Row], cache: KVCache | None = None) -> None:
        device = self.model.device
        ids = torch.zeros(len(rows), max(len(row.tokens) for row in rows), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row.tokens)] = torch.tensor(row.tokens)
        states = self.model.hidden_states(ids.to(device), cache=cache)
        owners, places, columns, targets = torch.tensor(
            [
                (request, place, column, token)
                for place, row in enumerate(rows)
                for request, tokens in row.expected
                for column, token in enumerate(tokens, len(row.tokens) - len(tokens))
            ]
        ).T
        losses, missed = self._predict(states[places.to(device), columns.to(device)], targets)
        self.sums.index_add_(0, owners, losses, alpha=-1)
        self.missed[owners[missed]] = True
        self.tokens += sum(len(row.tokens) for row in rows)

    def _predict(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses ``[N]`` in nats after ``[N, hidden]``, and whether another token is more
        likely."""
        losses, missed = [], []
        size = chunk_size(self.model.vocab_size, self.model.device)
        for x, y in zip(
            states.split(size), targets.to(states.device)[:, None].split(size), strict=True
        ):
            logits = self.model.logits(x).float()
            picked = logits.gather(-1, y)
            missed.append(logits.argmax(dim=-1, keepdim=True) != y)
            losses.append(logits.logsumexp(dim=-1, keepdim=True) - picked)
        return torch.cat(losses)[:, 0].double().cpu(), torch.cat(missed)[:, 0].cpu()
