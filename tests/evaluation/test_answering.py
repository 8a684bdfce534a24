"""Answers are those of every prompt read alone, whatever is shared and batched."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.model.test_cache import MODELS
from tests.model.test_generate import changing
from trainer.data.tokenizer import END_OF_TEXT
from trainer.evaluation.answering import answers, batches
from trainer.evaluation.scoring import Prompt
from trainer.model.generate import generate
from trainer.positional.rescaling import longrope

WORDS = 256


@pytest.fixture(scope="module")
def tokenizer():
    """Decodes different tokens to different texts."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.add_special_tokens([END_OF_TEXT])
    return words


@pytest.fixture(scope="module")
def end(tokenizer):
    return tokenizer.token_to_id(END_OF_TEXT)


@pytest.fixture
def build(tiny_decoder, tokenizer):
    """A decoder for the tokenizer."""

    def decoder(**positional):
        shape = positional.pop("model", {}) | {"vocab_size": tokenizer.get_vocab_size()}
        return tiny_decoder(model=shape, **positional)

    return decoder


def draw(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(WORDS, (count,), generator=generator).tolist())


def groups(count, length=40, cuts=(0, 1, 9, 22, 35), new=6):
    """Texts with something of three tokens put in at each cut, in an order that helps nobody."""
    prompts = []
    for group in range(count):
        text, put = draw(length - 3, group), draw(3, 1000 + group)
        places = [cut + (group + cut) % 2 for cut in cuts]
        prompts += [
            Prompt(text[:cut] + put + text[cut:], (), new, cut / length, group) for cut in places
        ]
    return prompts[::2] + prompts[1::2]


def singles(sizes=(7, 30, 12, 30, 1, 30), new=6):
    return [Prompt(draw(size, 99 + i), (), new + i % 2) for i, size in enumerate(sizes)]


@torch.no_grad()
def one_at_a_time(model, tokenizer, prompts):
    """The likeliest token of the whole prefix, again and again."""
    end, texts = tokenizer.token_to_id(END_OF_TEXT), []
    for prompt in prompts:
        tokens = list(prompt.tokens)
        for _ in range(prompt.new_tokens):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            if tokens[-1] == end:
                tokens.pop()
                break
        texts.append(tokenizer.decode(tokens[len(prompt.tokens) :]))
    return texts


def generated_alone(model, tokenizer, prompts):
    """Where the encoding changes with the length, what was read before it does is not read anew."""
    end, texts = tokenizer.token_to_id(END_OF_TEXT), []
    for prompt in prompts:
        (tokens,) = generate(model, [prompt.tokens], prompt.new_tokens, end_tokens=(end,))
        texts.append(tokenizer.decode([token for token in tokens if token != end]))
    return texts


@pytest.fixture
def read(monkeypatch):
    """Shapes of all that a model reads."""

    def watch(model):
        shapes, states = [], model.hidden_states

        def hidden_states(ids, **options):
            shapes.append(tuple(ids.shape))
            return states(ids, **options)

        monkeypatch.setattr(model, "hidden_states", hidden_states)
        return shapes

    return watch


@pytest.mark.parametrize("batch_tokens", [pytest.param(50, marks=pytest.mark.slow), 1000])
@pytest.mark.parametrize("change", [None, "sequence", "query", "long"])
@pytest.mark.parametrize("positional", MODELS.values(), ids=MODELS)
def test_sharing_and_batching_change_nothing(build, tokenizer, positional, change, batch_tokens):
    model = build(**positional)
    model.layout = changing(change)(model.layout)
    prompts = [*groups(2), *singles()]
    alone = generated_alone if model.layout.follows_length else one_at_a_time
    expected = alone(model, tokenizer, prompts)
    assert len(set(expected)) > 5
    assert answers(model, tokenizer, prompts, batch_tokens) == expected


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("batch_tokens", [1, 100, 300, 4096])
def test_any_batch_size_gives_the_same(build, tokenizer, batch_tokens, new):
    model = build()
    prompts = [*groups(3, new=new), *singles(new=new)]
    got = answers(model, tokenizer, prompts, batch_tokens)
    assert got == one_at_a_time(model, tokenizer, prompts)


@pytest.mark.parametrize("batch_tokens", [41, 4096])
def test_a_group_reads_its_common_beginning_once(build, tokenizer, read, batch_tokens):
    model = build()
    shapes = read(model)
    prompts = groups(1, cuts=(10, 20, 30), new=1)
    answers(model, tokenizer, prompts, batch_tokens)
    cuts = sorted(round(prompt.depth * 40) for prompt in prompts)
    assert shapes[0] == (1, 39)
    assert sorted(shapes[1:]) == [(1, 1), *((1, 40 - cut) for cut in cuts[-2::-1])]


def test_groups_are_read_together(build, tokenizer, read):
    model = build()
    shapes = read(model)
    answers(model, tokenizer, groups(3, cuts=(10, 20), new=1), 4096)
    assert [rows for rows, _ in shapes] == [3, 3, 3]


@pytest.mark.parametrize("batch_tokens", [50, 4096])
@pytest.mark.parametrize("factors", [(1.0, 3.0, 9.0, 27.0), (20.0,) * 4], ids=["some", "all"])
def test_answers_may_cross_the_length_at_which_longrope_switches(
    build, tokenizer, batch_tokens, factors
):
    """What is then read again changes no other answer of the text."""
    model = build(training_length=42)
    model.layout = model.layout.map(lambda s: longrope(s, (1.0,) * 4, factors, 42))
    prompts = groups(2)
    assert answers(model, tokenizer, prompts, batch_tokens) == (
        one_at_a_time(model, tokenizer, prompts)
    )


def test_one_token_answers_take_one_forward_pass_a_batch(build, tokenizer, read):
    model = build()
    shapes = read(model)
    answers(model, tokenizer, [replace(p, group=None) for p in groups(2, new=1)], 4 * 41)
    assert shapes == [(4, 40), (4, 40), (2, 40)]


def test_an_answer_ends_at_its_stop(build, tokenizer):
    model, prompts = build(), groups(2, new=12)
    whole = answers(model, tokenizer, prompts, 1000)
    asked = [
        replace(prompt, answers=(text.split()[2],))
        for prompt, text in zip(prompts, whole, strict=True)
    ]
    got = answers(model, tokenizer, asked, 1000, stop=lambda text, right: right[0] in text.split())
    for text, prompt, short in zip(whole, asked, got, strict=True):
        until = text.split().index(prompt.answers[0]) + 1
        assert short.split() == text.split()[:until]


def test_the_end_of_a_turn_ends_an_answer_too(build, tokenizer):
    model, (prompt,) = build(), groups(1, cuts=(5,))
    with torch.no_grad():
        likeliest = int(model(torch.tensor([prompt.tokens]))[0, -1].argmax())
    names = {"<|im_end|>" if i == likeliest else f"w{i}": i for i in range(WORDS)}
    with_turns = Tokenizer(WordLevel(names, unk_token="w0"))
    with_turns.add_special_tokens([END_OF_TEXT])
    assert answers(model, tokenizer, [prompt], 1000) != [""]
    assert answers(model, with_turns, [prompt], 1000) == [""]


def test_the_ends_that_a_model_names_replace_those_of_the_tokenizer(build, tokenizer, end):
    model, (prompt,) = build(), groups(1, cuts=(5,))
    with torch.no_grad():
        likeliest = int(model(torch.tensor([prompt.tokens]))[0, -1].argmax())
    whole = answers(model, tokenizer, [prompt], 1000)
    model.end_tokens = frozenset({likeliest})
    assert answers(model, tokenizer, [prompt], 1000) == [""]
    assert whole != [""]
    (text,) = answers(model, tokenizer, [prompt], 1000, never_first=(end,))
    assert text != ""  # neither may it come first, if a first token is ruled out


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(2, 30), st.integers(1, 3)), max_size=30),
    st.integers(1, 200),
)
def test_every_prompt_is_in_one_batch_within_the_budget(kinds, budget):
    prompts = [
        Prompt((group,) * (size - 1) + (index,), (), new, depth=index / 30, group=group or None)
        for index, (group, size, new) in enumerate(kinds)
    ]
    made = list(batches(prompts, budget))
    every = [i for batch in made for group in batch for i in group]
    assert sorted(every) == list(range(len(prompts)))
    for batch in made:
        indices = [i for group in batch for i in group]
        alone = [*batches([prompts[i] for i in indices], budget)]
        assert [[[indices[i] for i in group] for group in again] for again in alone] == [batch]
        sizes = {len(prompts[i].tokens) for group in batch for i in group}
        (new,) = {prompts[i].new_tokens for group in batch for i in group}
        assert len(batch) == 1 or len(batch) * (max(sizes) + new) <= budget
        if any(len(group) > 1 for group in batch):
            assert len(sizes) == 1
        for group in batch:
            assert len({prompts[i].group for i in group}) == 1
            assert prompts[group[0]].depth == max(prompts[i].depth for i in group)
