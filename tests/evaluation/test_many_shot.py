"""Many-shot prompts: their examples, lengths and needles, and the comparison of answers."""

from __future__ import annotations

import json

import pytest

from trainer.common.errors import UserError
from trainer.config import ManyShotSettings
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.many_shot import (
    filling,
    final_answer,
    many_shot_tasks,
    normalised,
    read_problems,
)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes: a token a character."""
    return train_tokenizer([], 257, [])


@pytest.fixture(scope="module")
def tasks(tokenizer, tmp_path_factory):
    """By name, of 400 sums."""
    sums = [(a, b, a + b) for a in range(10, 30) for b in range(10, 30)]
    rows = [
        {"problem": f"What is {a} + {b}?", "solution": f"{a} + {b} = {c}.", "answer": c}
        for a, b, c in sums
    ]
    file = tmp_path_factory.mktemp("math") / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ManyShotSettings(file=str(file), trials=5, new_tokens=32)
    return {task.name: task for task in many_shot_tasks(settings, Encoder(tokenizer, (7,), 7))}


@pytest.fixture
def math_file(tmp_path):
    def write(*rows):
        file = tmp_path / "math.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    return write


def examples(text):
    """The solved problems of a prompt, and the question."""
    *solved, question = text.split("\n\n")
    return solved, question


SHORTEST = len("Problem: What is 10 + 10?\nSolution: 10 + 10 = 20.\n\n")


@pytest.mark.slow
@pytest.mark.parametrize("length", [400, 1777])
@pytest.mark.parametrize("name", ["many_shot_needle", "many_shot_skip"])
def test_prompt_and_answer_fill_the_length(tasks, name, length):
    prompts = tasks[name].prompts(length)
    for prompt in prompts:
        assert prompt.tokens[0] == 7
        assert length - SHORTEST < len(prompt.tokens) + prompt.new_tokens <= length
    assert tasks[name].prompts(length) == prompts


@pytest.mark.parametrize(
    "answer", [{"solution": r"\boxed{}"}, {"solution": "3", "answer": "$"}, {"solution": "3"}]
)
def test_a_problem_with_an_empty_answer_is_refused(math_file, answer):
    """A text without a number would be right."""
    rows = {"problem": "One?", "solution": r"\boxed 9$"}, {"problem": "Two?", **answer}
    assert [answer for *_, answer in read_problems(math_file(rows[0]))] == ["9"]
    with pytest.raises(UserError, match=r"math\.jsonl: line 2: .*no answer"):
        read_problems(math_file(*rows))


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"problem": "One?"}', b'"\xff"'])
def test_a_damaged_line_is_told_with_its_file_and_number(tmp_path, line):
    file = tmp_path / "math.jsonl"
    file.write_bytes(b'{"problem": "Two?", "solution": "2", "answer": 2}\n\n' + line)
    with pytest.raises(UserError, match=r"math\.jsonl: line 3: expected a problem"):
        read_problems(str(file))


@pytest.mark.parametrize(("room", "left"), [(1, 1), (20, 16)])
def test_a_prompt_that_is_not_filled_is_refused_with_its_room(room, left):
    examples = [[0] * 9, [1, 1], [2, 2]]
    with pytest.raises(UserError, match=rf"evaluation\.lengths: .*\b{left} tokens"):
        filling(examples, 0, room, seed=0)


@pytest.mark.parametrize(("room", "chosen"), [(13, 2), (4, 2), (3, 1), (2, 1)])
def test_an_example_may_fill_the_room_to_its_last_token(room, chosen):
    examples = [[0] * 9, [1, 1], [2, 2]]
    assert len(filling(examples, 0, room, seed=0)) == chosen


def test_the_order_of_examples_depends_on_seed_and_problem():
    examples = [[number] for number in range(20)]
    orders = [filling(examples, *of) for of in ((0, 19, 1), (0, 19, 2), (0, 19, 1), (1, 19, 1))]
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert orders[0][:5] != orders[3][:5]


def test_tokens_before_every_text_take_room_too(math_file, tokenizer):
    rows = [{"problem": f"{i}?", "solution": "S", "answer": i} for i in range(60)]
    settings = ManyShotSettings(file=math_file(*rows), trials=3, new_tokens=32)
    for task in many_shot_tasks(settings, Encoder(tokenizer, (7,) * 200, 7)):
        assert {prompt.tokens[:200] for prompt in task.prompts(900)} == {(7,) * 200}
        assert len(task.at(900).trials) in (3, 12)  # it raises if one is longer


def test_of_a_problem_that_stands_twice_the_first_solution_counts(math_file):
    rows = [{"problem": "P", "solution": s, "answer": a} for s, a in (("S", 1), ("T", 2))]
    assert read_problems(math_file(*rows)) == [
        ("Problem: P\nSolution:", "Problem: P\nSolution: S\n\n", "1")
    ]


def test_the_needle_is_the_solved_question_at_its_depth(tasks, tokenizer):
    prompts = tasks["many_shot_needle"].prompts(2000)
    assert len(prompts) == 5 * 4
    assert [prompt.label for prompt in prompts[:4]] == ["0%", "33%", "67%", "100%"]
    for prompt in prompts:
        solved, question = examples(tokenizer.decode(prompt.tokens[1:]))
        (place,) = [i for i, text in enumerate(solved) if text.startswith(question)]
        assert solved[place].endswith(f" = {prompt.answers[0]}.")
        assert place == pytest.approx(prompt.depth * (len(solved) - 1), abs=0.51)
        assert len(set(solved)) == len(solved)


def test_without_needle_the_question_is_new(tasks, tokenizer):
    for prompt in tasks["many_shot_skip"].prompts(2000):
        solved, question = examples(tokenizer.decode(prompt.tokens[1:]))
        assert len(solved) > 20
        assert not any(text.startswith(question) for text in solved)


@pytest.mark.parametrize("name", ["many_shot_needle", "many_shot_skip"])
def test_each_problem_has_examples_in_an_order_of_its_own(tasks, tokenizer, name):
    """The same ones at all of its depths."""
    orders = {}
    for prompt in tasks[name].prompts(1500):
        solved, question = examples(tokenizer.decode(prompt.tokens[1:]))
        others = tuple(text for text in solved if not text.startswith(question))
        orders.setdefault(question, set()).add(others[:5])
    assert len(orders) == 5
    assert {len(of_problem) for of_problem in orders.values()} == {1}
    assert len(set().union(*orders.values())) == 5


def test_all_tasks_ask_the_same_problems(tasks, tokenizer):
    questions = {
        name: list(
            dict.fromkeys(
                examples(tokenizer.decode(prompt.tokens[1:]))[1] for prompt in task.prompts(600)
            )
        )
        for name, task in tasks.items()
    }
    assert questions["many_shot_needle"] == questions["many_shot_skip"] == questions["zero_shot"]
    assert len(questions["zero_shot"]) == 5


def test_another_seed_asks_other_problems(math_file, tokenizer):
    rows = ({"problem": f"{i} - {i}?", "solution": "", "answer": i} for i in range(1000))
    settings = ManyShotSettings(file=math_file(*rows), trials=5)
    asked = []
    for seed in (1, 1, 2):
        *_, zero_shot = many_shot_tasks(settings, Encoder(tokenizer, (7,), 7), seed)
        asked.append([prompt.answers for prompt in zero_shot.prompts(1024)])
    assert asked[0] == asked[1]
    assert {*asked[0]}.isdisjoint(asked[2])


def test_depths_of_one_problem_are_a_group_of_equal_length(tasks):
    prompts = tasks["many_shot_needle"].prompts(900)
    for start in range(0, len(prompts), 4):
        four = prompts[start : start + 4]
        assert len({prompt.group for prompt in four}) == 1
        assert len({tuple(sorted(prompt.tokens)) for prompt in four}) == 1
        assert len({prompt.tokens for prompt in four}) == 4
    assert len({prompt.group for prompt in prompts}) == 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 47 + 35 = 82.\n\nProblem: What is 1 + 1?", 1),
        (r" It is \boxed{82}. Check: 47 and 35.", 1),
        (" 47 + 35 = 81.\n\nProblem: 82", 0),
        ("", 0),
    ],
)
def test_the_final_answer_before_the_next_problem_counts(tasks, text, value):
    task = tasks["many_shot_needle"]
    assert task.score(text, ("82",)) == value
    assert task.stop(text, ("82",)) == ("Problem:" in text)


def test_a_file_of_math_is_asked(math_file, tokenizer):
    rows = [
        {"problem": f"Half of {i}?", "solution": rf"$\boxed{{\frac{{{i}}}{{2}}}}$", "level": 5}
        for i in range(30)
    ]
    file = math_file(*rows, rows[0], {"problem": "Q", "solution": "S", "answer": r"\text{A}"})
    settings = ManyShotSettings(file=file, new_tokens=50)
    encoder = Encoder(tokenizer, (), 7)
    made = many_shot_tasks(settings, encoder)
    prompts = made[1].prompts(1400)
    assert len(prompts) == 31
    for prompt in prompts:  # nearly all others are examples, the question never
        solved, question = examples(tokenizer.decode(prompt.tokens))
        assert len(solved) >= 24
        assert not any(text.startswith(question) for text in solved)
    (asked,) = [p for p in prompts if tokenizer.decode(p.tokens).endswith("Half of 0?\nSolution:")]
    assert asked.answers == (r"\frac{0}{2}",)
    assert made[1].score(r"Thus \boxed{\dfrac{0}{2}}.", asked.answers) == 1
    (*_, zero_shot) = many_shot_tasks(ManyShotSettings(file=file), encoder)
    assert {prompt.new_tokens for prompt in zero_shot.prompts(2200)} == {2048}


def test_a_separator_of_lines_within_a_problem_is_text(tmp_path):
    file = tmp_path / "math.jsonl"
    rows = [{"problem": f"One\u2028{i}", "solution": "S\u0085", "answer": i} for i in range(2)]
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_text("\n".join(lines), encoding="utf-8")
    assert [question for question, _, _ in read_problems(str(file))] == [
        "Problem: One\u20280\nSolution:", "Problem: One\u20281\nSolution:",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}, of 3", "2"),
        (r"\boxed{\{1, {2}\}} {", r"\{1, {2}\}"),
        (r"12 + 5 = 17, no: -1,234.5", "-1,234.5"),
        (r"\boxed{7", "7"),
        (r"from 12 follows $x = \boxed 2$ of 3.", "2"),
        (r"$\boxed\frac{1}{2}$, not 3", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"of 5, $\boxed{}$", "5"),
        ("I do not know.", ""),
    ],
)
def test_the_boxed_answer_or_else_the_last_number(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "same",
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}", r" \tfrac{1} {2} "),
        (r"\left(1, 2\right)", "(1,2)"),
        ("1,234,567", "1234567", "1{,}234{,}567".replace("{,}", r"\!,")),
        (r"45^\circ", r"45^{\circ}", "45"),
        (r"50\%", "50%", r"50\,"),
        (r"\text{east}", "east", "east."),
        (r"\$5", "$5$", "5", "x = 5", r"5\text{ cm}"),
        (r"\frac12", "1/2", "0.5", ".5"),
        (r"\sqrt3", r"\sqrt{3}"),
    ],
)
def test_looks_do_not_matter(same):
    assert len({normalised(answer) for answer in same}) == 1


def test_other_answers_stay_apart():
    different = (r"x\rightarrow 1", "1", "-1", "3.5", "0.35", "-1/3", "3", r"\text{ even}", "odd")
    assert len({normalised(answer) for answer in different}) == len(different)
