"""Log-likelihoods of continuations; a prefix that requests share is read once.

Contexts and continuations become tokens, truncated as in lm-eval's ``hf`` model. Contexts of one
length are read together, and those that several continuations share once. Only states that predict
a continuation pass through the head, in chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.common.errors import UserError
from trainer.evaluation.answering import read_sharing
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size

Tokens = tuple[int, ...]
Pair = tuple[str, str]
"""A context and a continuation, a space between them belonging to the continuation."""


@dataclass(frozen=True)
class Request:
    """Request for the likelihood of the tokens ``continuation`` after the tokens ``context``.

    Neither is empty.
    """

    context: Tokens
    continuation: Tokens

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

    ``first_token``: stands for an empty context. ``begins``: begin every context with it, as in
    training; a token that the tokenizer itself adds is there in any case.
    """

    tokenizer: Tokenizer
    first_token: int
    begins: bool = False

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of texts, each from its first token on."""
        before = [self.first_token] if self.begins else []
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
            requests.append(request)
        return requests

    def _after_nothing(self, text: str) -> Request:
        tokens = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
        has_bos = tokens[:1] == (self.first_token,)
        return Request((self.first_token,), tokens[1:] if has_bos else tokens)


def _with_spaces_in_the_continuation(context: str, continuation: str) -> Pair:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


@dataclass(frozen=True)
class Likelihood:
    """``log_likelihood`` of a continuation in nats; ``greedy``: whether no token is likelier."""

    log_likelihood: float
    greedy: bool


@torch.no_grad()
def log_likelihoods(
    model: LanguageModel, requests: Sequence[Request], batch_tokens: int
) -> list[Likelihood]:
    """Return the log-likelihood of every continuation, as if each were computed alone.

    ``batch_tokens``: tokens per forward pass, including cached ones (at least one context).
    """
    longest = max((len(r.context) + len(r.continuation) - 1 for r in requests), default=0)
    # Keys that depend on what follows cannot be shared, and padding would change them.
    alone = model.follows_length(longest)
    groups: dict[tuple[Tokens, int], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        groups[request.context, index if alone else 0].append(index)
    alike: dict[tuple[int, int, int], list[list[int]]] = defaultdict(list)
    for (context, _), group in groups.items():
        width = len(requests[group[0]].continuation) if alone else 0
        alike[len(context), len(group), width].append(group)
    results: dict[int, Likelihood] = {}
    for (length, count, _), same in sorted(alike.items(), reverse=True):
        width = max(len(requests[i].continuation) for group in same for i in group)
        together = max(1, batch_tokens // (count * (length + width)))
        for first in range(0, len(same), together):
            # read_sharing takes one request of each group after the other.
            indices = [i for row in zip(*same[first : first + together], strict=True) for i in row]
            results |= zip(
                indices, _read(model, [requests[i] for i in indices], count), strict=True
            )
    return [results[index] for index in range(len(requests))]


def _read(model: LanguageModel, requests: Sequence[Request], count: int) -> list[Likelihood]:
    """Read requests with contexts of one length, each of which ``count`` requests share."""
    wanted, length = [request.continuation for request in requests], len(requests[0].context)
    last = max(map(len, wanted))
    # Padded on the right, which causal models do not see.
    rows = [
        [*r.context, *r.continuation[:-1], *[0] * (last - len(r.continuation))] for r in requests
    ]
    if count > 1:
        # The last token of the context is read again: its state predicts the first token.
        states, _ = read_sharing(model, rows, [length - 1] * (count - 1), 0, last)
    else:
        states = model.prefilled(torch.tensor(rows, device=model.device), last=last)
    return _likelihoods(
        model, [row[: len(tokens)] for row, tokens in zip(states, wanted, strict=True)], wanted
    )


def _likelihoods(
    model: LanguageModel, states: Sequence[Tensor], wanted: Sequence[Tokens]
) -> list[Likelihood]:
    """Return the likelihoods of tokens that states ``[n, hidden]`` predict, one for each pair."""
    likelihoods, is_likeliest = [], []
    targets = torch.tensor(list(chain.from_iterable(wanted)), device=model.device)[:, None]
    size = chunk_size(model.vocab_size, model.device)
    for x, y in zip(torch.cat(list(states)).split(size), targets.split(size), strict=True):
        logits = model.logits(x).float()
        likelihoods.append(logits.gather(-1, y) - logits.logsumexp(dim=-1, keepdim=True))
        is_likeliest.append(logits.argmax(dim=-1, keepdim=True) == y)
    sizes = [len(tokens) for tokens in wanted]
    by_token = torch.cat(likelihoods)[:, 0].double().cpu().split(sizes)
    greedy = torch.cat(is_likeliest)[:, 0].cpu().split(sizes)
    return [
        Likelihood(float(a.sum()), bool(b.all())) for a, b in zip(by_token, greedy, strict=True)
    ]
