"""Paragraphs are told apart by their headings, and looked up in the files."""

import json
import re
from collections import Counter

import pytest

from tests.evaluation.ruler.conftest import hotpotqa, squad
from trainer.common.errors import UserError
from trainer.evaluation.ruler.question_answering import read_hotpotqa, read_squad


def paragraphs(text):
    """The documents of a prompt, whose numbers must be 1, 2, 3, and so on."""
    context = text.split("given documents.\n\n")[1].rsplit("\n\nAnswer the question", 1)[0]
    found = re.findall(r"Document (\d+):\n(.*?)(?=\n\nDocument |$)", context, re.DOTALL)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


@pytest.mark.parametrize("length", [300, 900])
def test_squad(texts, length):
    articles = [{p["context"] for p in a["paragraphs"]} for a in squad()["data"]]
    trials = texts("qa_1", length)
    # The first five questions of the file, without those that have no answer.
    names = [(a, p) for a in range(5) for p in range(4)][:5]
    places = set()
    for (a, p), (text, answers, _) in zip(names, trials, strict=True):
        assert text.endswith(f"Question: How many people has town {a}.{p}? Answer:")
        assert answers == (f"{a + 1}{p}0", f"{a + 1}{p}0 p")
        given = paragraphs(text)
        places.add(next(i for i, t in enumerate(given) if t.startswith(f"Town {a}.{p} ")))
        assert len(set(given)) == len(given)
        assert set(given) <= set.union(*articles)
        # The rest of the article comes before other articles.
        assert set(given) <= articles[a] or set(given) > articles[a]
        assert all(answer in text for answer in answers)
    assert len(places) > 1


def test_hotpotqa(texts):
    for q, (text, answers, _) in enumerate(texts("qa_2", 2048)):
        assert text.endswith(f"Question: Who owns lake {q}? Answer:")
        assert answers == (f"owner {q}",)
        own = {f"{title}\n{''.join(lines)}" for title, lines in hotpotqa()[q]["context"]}
        assert own <= set(paragraphs(text))
        assert f"Lake {q}-3\nIts owner is owner {q}. It is deep." in paragraphs(text)


def test_a_length_beyond_all_paragraphs_repeats_them(texts):
    for text, _, _ in texts("qa_2", 6144):
        counts = Counter(paragraphs(text))
        assert len(counts) == 60
        assert max(counts.values()) - min(counts.values()) == 1


def test_files_of_another_kind_are_named(tmp_path):
    path = tmp_path / "file.json"
    for content in ("no json", "[1]", "{}", '{"data": [{"paragraphs": 3}]}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"ruler\.squad_file: '.*file.json' is no SQuAD file"):
            read_squad(str(path))
    path.write_text(json.dumps(squad()))
    with pytest.raises(UserError, match=r"ruler\.hotpotqa_file: '.*' is no HotpotQA file"):
        read_hotpotqa(str(path))
    path.write_text('{"data": []}')
    with pytest.raises(UserError, match="holds no question with an answer"):
        read_squad(str(path))
    with pytest.raises(UserError, match="is no SQuAD file"):
        read_squad(str(tmp_path / "none.json"))
