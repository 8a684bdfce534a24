"""The assignments of a prompt are carried out."""

import re

import pytest

from trainer.evaluation.ruler.question import NOISE


def carried_out(text):
    """The variables' values, and the value asked for."""
    values, noise = {}, 0
    for line in text.split("\n"):
        if match := re.fullmatch(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+) |(\d{5}))", line):
            name, other, number = match.groups()
            values[name] = values[other] if other else int(number)
        noise += line == NOISE
    return values, int(re.search(r"assigned the value (\d+) in the text above", text)[1]), noise


@pytest.mark.parametrize("length", [1536, 6144])
def test_the_answers_are_the_variables_with_the_value(texts, length):
    for text, answers, depth in texts("vt", length):
        example, asked = text.split("\n\nMemorize")
        values, value, noise = carried_out(asked)
        assert tuple(name for name in values if values[name] == value) == answers
        assert len(values) == len(answers) == 5
        assert all(len(name) == 5 for name in answers)
        assert noise >= 5
        assert text.endswith(f"5 variables are assigned the value {value}, they are: ")
        context = asked.split("\n\n", 1)[1].split("\nQuestion:")[0]
        assert depth == pytest.approx(context.index("VAR ") / len(context))
        values, value, _ = carried_out(example)
        assert example.endswith(f"value {value}, they are:  {' '.join(values)}")
        assert set(values.values()) == {value}
        assert all(len(name) == 3 for name in values)


def test_the_example_is_about_500_tokens(texts, tokenizer):
    for text, _, _ in texts("vt", 6144):
        example = text.split("\n\nMemorize")[0]
        assert 450 < len(tokenizer.encode(example).ids) < 530


def test_values_and_names_change_from_trial_to_trial(texts):
    found = texts("vt", 1536)
    assert len({answers for _, answers, _ in found}) == 5
    assert len({re.findall(r"= (\d+)", text)[0] for text, _, _ in found}) == 5
