"""Log-likelihoods of continuations; a context that requests share is read once.

Contexts and continuations become tokens, truncated as in lm-eval's ``hf`` model. Contexts of one
length are read together.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from trainer.model.generate import read_rows
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size

Tokens = tuple[int, ...]


class Request(NamedTuple):
    """Tokens of a context and of a continuation whose likelihood is asked for; neither is empty."""

    context: Tokens
    continuation: Tokens


@dataclass(frozen=True)
class Encoder:
    """Encodes texts for a model. ``bos``: tokens before every text. ``first_token``: the token that
    a model reads in place of an empty context; it begins sequences in training."""

    tokenizer: Tokenizer
    bos: tuple[int, ...]
    first_token: int

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Return token ids of texts, each after ``bos``."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [(*self.bos, *encoding.ids) for encoding in encodings]

    def requests(self, pairs: Sequence[tuple[str, str]]) -> list[Request]:
        """Encode context and continuation together, and split the tokens where the context ends; a
        space between them belongs to the continuation."""
        stripped = [context.rstrip() for context, _ in pairs]
        texts = [context + continuation for context, continuation in pairs]
        tokens = zip(self.tokens(stripped), self.tokens(texts), strict=True)
        requests = []
        for text, context_text, (prefix, whole) in zip(texts, stripped, tokens, strict=True):
            context = prefix
            continuation = whole[len(prefix) :]
            if not context_text:
                context = (self.first_token,)
                if continuation[:1] == context:
                    continuation = continuation[1:]
            if not continuation:
                raise ValueError(f"{text!r} adds no token to {context_text!r}")
            requests.append(Request(context, continuation))
        return requests


@torch.no_grad()
def log_likelihoods(
    model: LanguageModel,
    requests: Sequence[Request],
    batch_tokens: int,
    max_length: int | None = None,
) -> list[tuple[float, bool]]:
    """Return the log-likelihood in nats of every continuation, and whether all of its tokens are
    the most likely ones, as if each were computed alone.

    ``batch_tokens``: tokens per forward pass, including cached ones (at least one request).
    ``max_length``: most tokens that the model reads. Longer contexts lose their beginning but keep
    one token; a continuation is never truncated.
    """
    if max_length is not None:
        room = max_length + 1
        requests = [Request(c[-max(1, room - len(new)) :], new) for c, new in requests]
    longest = max((len(context) + len(new) - 1 for context, new in requests), default=0)
    # Padding would change an encoding that depends on the length.
    alone = model.layout.at(longest) != model.layout.at(1)
    by_lengths: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (context, new) in enumerate(requests):
        new_length = len(new) if alone else 0
        by_lengths[len(context), new_length].append(index)
    results: dict[int, tuple[float, bool]] = {}
    for (length, _), of_lengths in sorted(by_lengths.items(), reverse=True):
        width = max(len(requests[index].continuation) for index in of_lengths)
        together = max(1, batch_tokens // (length + width))
        for first in range(0, len(of_lengths), together):
            indices = of_lengths[first : first + together]
            likelihoods = _read(model, [requests[index] for index in indices])
            results |= zip(indices, likelihoods, strict=True)
    return [results[index] for index in range(len(requests))]


def _read(model: LanguageModel, requests: Sequence[Request]) -> list[tuple[float, bool]]:
    """Read requests with contexts of one length, equal ones once."""
    wanted = [new for _, new in requests]
    length = len(requests[0].context)
    last = max(map(len, wanted))
    # Padded on the right, which causal models do not see.
    rows = [[*context, *new[:-1], *[0] * (last - len(new))] for context, new in requests]
    ids = torch.tensor(rows, device=model.device)
    distinct = dict.fromkeys(context for context, _ in requests)
    contexts = {context: row for row, context in enumerate(distinct)}
    if length > 1 and len(contexts) < len(requests):
        begin = length - 1  # the state of the last token of the context predicts the first token
        before = torch.tensor([context[:-1] for context in contexts], device=model.device)
        trunk = model.empty_cache(len(contexts), begin)
        read_rows(model, before, trunk, ids.shape[1])
        cache = model.empty_cache(*ids.shape)
        cache.copy_from(trunk, begin, [contexts[context] for context, _ in requests])
        new = ids[:, begin:]
        states = read_rows(model, new, cache, ids.shape[1], last=last)
    else:
        states = model.prefilled(ids, length=ids.shape[1], last=last)
    # Only states that predict a token of a continuation go through the head.
    predicting = torch.cat([row[: len(new)] for row, new in zip(states, wanted, strict=True)])
    targets = torch.tensor([*chain.from_iterable(wanted)], device=model.device)[:, None]
    likelihoods = []
    is_likeliest = []
    size = chunk_size(model.vocab_size, model.device)
    for x, y in zip(predicting.split(size), targets.split(size), strict=True):
        logits = model.logits(x).float()
        likelihoods.append(logits.gather(-1, y) - logits.logsumexp(dim=-1, keepdim=True))
        is_likeliest.append(logits.argmax(dim=-1, keepdim=True) == y)
    sizes = [len(new) for new in wanted]
    by_token = torch.cat(likelihoods)[:, 0].double().cpu().split(sizes)
    greedy = torch.cat(is_likeliest)[:, 0].cpu().split(sizes)
    return [(float(a.sum()), bool(b.all())) for a, b in zip(by_token, greedy, strict=True)]
