"""Log-likelihoods in batches are those of every request read alone."""

import copy

import pytest
import torch

from tests.model.test_cache import MODELS
from trainer.data.tokenizer import END_OF_TEXT, train_tokenizer
from trainer.evaluation.likelihood import Encoder, Request, log_likelihoods
from trainer.positional.rescaling import dynamic, longrope, ntk_aware

TEXTS = [f"The answer to question {i} is either {i * i} or {i + 7}, they say. " for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300, ())


def some_requests(seed=0):
    """Contexts with one continuation and with several, one of a single token, some twice."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return tuple(torch.randint(50, (count,), generator=generator).tolist())

    sizes = [(3, [4]), (20, [1, 1, 1]), (9, [5, 1, 12]), (8, [2, 2]), (1, [30]), (15, [1])]
    requests = [
        Request(context, tokens(n)) for c, news in sizes for context in [tokens(c)] for n in news
    ]
    return requests + requests[4:7]


@torch.no_grad()
def one_at_a_time(model, requests):
    """(log-likelihood, greedy), by a forward pass over each whole request in float64."""
    model = copy.deepcopy(model).double()
    expected = []
    for request in requests:
        ids = torch.tensor([request.context + request.continuation])
        logits = model(ids[:, :-1])[0, len(request.context) - 1 :]
        targets = torch.tensor(request.continuation)
        chosen = logits.log_softmax(-1).gather(-1, targets[:, None])
        expected.append((chosen.sum().item(), bool((logits.argmax(-1) == targets).all())))
    return expected


def assert_same(got, expected):
    for (log_likelihood, is_greedy), (total, greedy) in zip(got, expected, strict=True):
        assert log_likelihood == pytest.approx(total, abs=2e-4)
        assert is_greedy is greedy


def greedy_requests(model):
    """Requests whose continuations the model would write itself."""
    requests = []
    for request in some_requests(1)[:8]:
        ids = torch.tensor([request.context])
        for _ in request.continuation:
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
        requests.append(Request(request.context, tuple(ids[0, len(request.context) :].tolist())))
    return requests


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
def test_batching_and_shared_contexts_change_nothing(tiny_decoder, positional, batch_tokens):
    model = tiny_decoder(**positional)
    requests = [*some_requests(), *greedy_requests(model)]
    expected = one_at_a_time(model, requests)
    assert 8 <= sum(greedy for _, greedy in expected) < len(requests)
    assert_same(log_likelihoods(model, requests, batch_tokens), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.with_temperature(coefficient=0.4),
        lambda s: dynamic(s, ntk_aware, 10, 4.0),
    ],
    ids=["temperature", "frequencies"],
)
def test_encodings_that_change_with_the_length(tiny_decoder, change):
    model = tiny_decoder(training_length=10)
    model.layout = model.layout.map(change)
    requests = some_requests()
    assert_same(log_likelihoods(model, requests, 4096), one_at_a_time(model, requests))


@pytest.mark.parametrize("context", [1, 9, 11])
@pytest.mark.parametrize("longest", [9, 11])  # of 11 and 13 tokens that are read, where C is 12
@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.with_temperature(coefficient=9.0),
        lambda s: dynamic(s, ntk_aware, 12, 99.0),
        lambda s: longrope(s, (1.0,) * 4, (9.0,) * 4, 12),
    ],
    ids=["temperature", "frequencies", "other frequencies"],
)
def test_a_short_continuation_is_read_as_alone_beside_one_beyond_the_training_length(
    tiny_decoder, change, longest, context
):
    """Contexts are within the training length; only the padding would be beyond it."""
    model = tiny_decoder(training_length=12)
    model.layout = model.layout.map(change)
    draw = torch.Generator().manual_seed(3)
    contexts = torch.randint(50, (3, context), generator=draw).tolist()
    sizes = [1, 2, max(2, longest + 3 - context)]
    requests = [
        Request(tuple(ids), tuple(range(n))) for ids in (*contexts, contexts[0]) for n in sizes
    ]
    assert_same(log_likelihoods(model, requests, 4096), one_at_a_time(model, requests))


def test_sums_are_more_precise_than_the_weights(tiny_decoder):
    model = tiny_decoder().bfloat16()
    (request,) = some_requests()[:1]
    ids = torch.tensor([request.context + request.continuation])
    with torch.no_grad():
        losses = model(ids[:, :-1])[0, len(request.context) - 1 :].float().log_softmax(dim=-1)
    expected = sum(losses[range(4), list(request.continuation)].tolist())
    ((total, _),) = log_likelihoods(model, [request], 4096)
    assert total == pytest.approx(expected, abs=1e-4)


def test_contexts_are_read_once_and_only_continuations_go_through_the_head(
    tiny_decoder, monkeypatch
):
    model = tiny_decoder()
    context, choices = tuple(range(20)), ((1,), (2, 3, 4), (5, 6, 7))
    read, predicted = [], []
    states, logits = model.hidden_states, model.logits
    monkeypatch.setattr(
        model, "hidden_states", lambda ids, **kw: (read.append(ids.shape), states(ids, **kw))[1]
    )
    monkeypatch.setattr(model, "logits", lambda x: (predicted.append(len(x)), logits(x))[1])
    log_likelihoods(model, [Request(context, choice) for choice in choices], 4096)
    assert read == [(1, 19), (3, 3)]  # the last token of the context predicts the first one
    assert sum(predicted) == sum(map(len, choices))


@pytest.mark.parametrize("pair", [("a b  ", "c"), ("a b", "  c"), ("a b ", " c")])
def test_spaces_belong_to_the_continuation(tokenizer, pair):
    (request,) = Encoder(tokenizer, (), 0).requests([pair])
    assert tokenizer.decode(list(request.context)) == "a b"
    assert tokenizer.decode(list(request.continuation)) == "  c"


@pytest.mark.parametrize("add_bos", [False, True])
def test_end_of_text_stands_for_an_empty_context_and_begins_others_if_asked(tokenizer, add_bos):
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoder = Encoder(tokenizer, (end,) if add_bos else (), end)
    empty, given_begin, other = encoder.requests([("", "a"), ("", f"{END_OF_TEXT}a"), ("a", " b")])
    assert empty == given_begin == Request((end,), tuple(tokenizer.encode("a").ids))
    assert other.context == ((end,) if add_bos else ()) + tuple(tokenizer.encode("a").ids)


def test_a_tokenizer_with_its_own_first_token_gets_no_other(tokenizer):
    from tokenizers.processors import TemplateProcessing

    beginning = type(tokenizer).from_str(tokenizer.to_str())
    beginning.post_processor = TemplateProcessing(single="A $0", special_tokens=[("A", 7)])
    requests = Encoder(beginning, (7,), 7).requests([("a", " b"), ("", "b")])
    assert [request.context for request in requests] == [(7, *tokenizer.encode("a").ids), (7,)]
    (request,) = Encoder(beginning, (7, 8), 5).requests([("", "b")])
    assert request == ((5,), tuple(tokenizer.encode("b").ids))


@pytest.mark.parametrize("room", [1, 2, 9])
def test_long_contexts_lose_their_beginning(tiny_decoder, room):
    """The last token is only predicted, so that max_length + 1 tokens remain."""
    context, new = tuple(range(20)), (7, 8, 9)
    model = tiny_decoder()
    cut = log_likelihoods(model, [Request(context, new)], 4096, max_length=room + 1)
    left = max(1, room + 2 - len(new))
    assert_same(cut, one_at_a_time(model, [Request(context[-left:], new)]))
