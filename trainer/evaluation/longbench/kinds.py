"""Prompt, answer length and metric of each LongBench task.

The wording, including a misspelling, is that of the benchmark's ``dataset2prompt.json``, numbers of
tokens that of its ``dataset2maxlen.json``, metrics those of its ``eval.py``. Metrics compare one
continuation with one right answer, 0 to 1. Each equals the benchmark's own ``metrics.py`` with the
libraries in its ``requirements.txt``: ``rouge`` 1.0.1, and ``fuzzywuzzy``, which uses Python's
difflib. Neither has had a release since 2021, and the parts needed are short.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
COMMENTS = ("`", "#", "//")
"""Lines with any of them are no code."""


def qa_f1(prediction: str, answer: str) -> float:
    """Return F1 of the words, ignoring case, punctuation and articles (SQuAD's)."""
    said, right = _words(prediction), _words(answer)
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def rouge_l(prediction: str, answer: str) -> float:
    """Return ROUGE-L of whole summaries (Lin 2004, Sec. 3.2), as ``rouge`` counts it.

    The words of the longest common subsequences of all pairs of sentences are compared with the
    words of both texts, as sets. Sentences end at full stops, and case matters. Two sentences of a
    thousand words together exceed Python's recursion limit in ``rouge``, for which the benchmark
    counts 0; here they are compared.
    """
    said, right = _sentences(prediction), _sentences(answer)
    if not said or not right:
        return 0.0
    common = len({word for x in right for y in said for word in longest_common_subsequence(x, y)})
    precision = common / len({word for sentence in said for word in sentence})
    recall = common / len({word for sentence in right for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # `rouge` treats white space between two full stops as a sentence of one empty word.
    return [part.split() or [""] for part in text.split(".") if part]


def longest_common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """Return one of the longest common subsequences; the choice affects a union of several.

    From the ends, a common last word belongs to it; otherwise x loses its last word only if keeping
    it would cost length.
    """
    table = [[0] * (len(y) + 1)]
    for word in x:
        row = [0]
        for j, other in enumerate(y):
            row.append(table[-1][j] + 1 if word == other else max(table[-1][j + 1], row[j]))
        table.append(row)
    i, j = len(x), len(y)
    found = []
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.append(x[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 / (number of classes named) if the right one is among them, else 0.

    A class whose name is part of the right one's does not count.
    """
    named = [name for name in classes if name in prediction]
    named = [name for name in named if name == answer or name not in answer]
    return 1 / len(named) if answer in named else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Return the similarity of the first line of code to the right line, in whole percents."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if is_code(line)), "")
    if line == answer or not line or not answer:
        return float(line == answer)
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def is_code(line: str) -> bool:
    """Whether the line has no mark of a comment or of formatting."""
    return not any(mark in line for mark in COMMENTS)


def count(prediction: str, answer: str) -> float:
    """Return the share of the numbers in the prediction that equal the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Return :func:`count` for an answer ``Paragraph 7``."""
    found = re.search(r"Paragraph (\d+)", answer)
    return count(prediction, found[1]) if found else 0.0


SINGLE, MULTI = "Single-Document QA", "Multi-Document QA"
SUMMARY, FEW_SHOT = "Summarization", "Few-shot Learning"
SYNTHETIC, CODE = "Synthetic", "Code Completion"


@dataclass(frozen=True)
class LongBenchKind:
    """One kind of task.

    ``template``: with placeholders ``context`` and ``input``. ``new_tokens``: limit of an answer.
    ``metric``: of a prediction and one answer, and for classification the classes. ``first_line``:
    only the first non-empty line counts. ``one_line``: an answer cannot begin with a line break or
    the end of the text, and ends with its first line; the benchmark's ``pred.py`` does so for
    SAMSum alone.
    """

    title: str
    category: str
    template: str
    new_tokens: int
    metric: Callable[..., float]
    first_line: bool = False
    one_line: bool = False

    def counted(self, text: str) -> str:
        """Return the part of a continuation that is scored."""
        return text.lstrip("\n").split("\n")[0] if self.first_line else text

    def stop(self, text: str, answers: Sequence[str]) -> bool:
        """Whether further text cannot change the score."""
        complete = text.lstrip("\n").split("\n")[:-1]
        if self.metric is code_similarity:
            return any(map(is_code, complete))
        return self.first_line and bool(complete)


_ONLY = "Only give me the answer and do not output any other words."
_PHRASE = "concisely as you can, using a single phrase"
_SILENT = "Do not provide any explanation."

_STORY = (
    "You are given a story, which can be either a novel or a movie script, and a question. "
    f"Answer the question as{_PHRASE} if possible. {_SILENT}\n\nStory: {{context}}\n\n"
    f"Now, answer the question based on the story as{_PHRASE} if possible. {_SILENT}\n\n"
    "Question: {input}\n\nAnswer:"
)
_ANSWERABLE = (
    f"as {_PHRASE} or sentence if possible. If the question cannot be answered based on the "
    'information in the article, write "unanswerable". If the question is a yes/no question, '
    f'answer "yes", "no", or "unanswerable". {_SILENT}'
)
_ARTICLE = (
    "You are given a scientific article and a question. "
    f"Answer the question {_ANSWERABLE}\n\nArticle: {{context}}\n\n "
    f"Answer the question based on the above article {_ANSWERABLE}\n\n"
    "Question: {input}\n\nAnswer:"
)
_TEXT = (
    "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
    "question based on the above text, only give me the answer and do not output any other words."
    "\n\nQuestion: {input}\nAnswer:"
)
_PASSAGES = (
    f"Answer the question based on the given passages. {_ONLY}\n\n"
    "The following are given passages.\n{context}\n\n"
    f"Answer the question based on the given passages. {_ONLY}\n\nQuestion: {{input}}\nAnswer:"
)
_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
    "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"
)
_MEETING = (
    "You are given a meeting transcript and a query containing a question or instruction. "
    "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
    "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
    "Query: {input}\nAnswer:"
)
_NEWS = (
    "You are given several news passages. Write a one-page summary of all news. \n\n"
    "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"
)
_TYPE = (
    "Please determine the type of the question below. Here are some examples of questions.\n\n"
    "{context}\n{input}"
)
_TRIVIA = (
    f"Answer the question based on the given passage. {_ONLY} The following are some examples.\n\n"
    "{context}\n\n{input}"
)
_DIALOGUE = (
    "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
    "{context}\n\n{input}"
)
_COUNT = (
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
    "Please carefully read these paragraphs and determine how many unique paragraphs there are "
    "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
    "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
    "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
    "\n\nThe final answer is: "
)
_ABSTRACT = (
    "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
    "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\n"
    "Please enter the number of the paragraph that the abstract is from. The answer format must be "
    'like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
)
_FILE = "Please complete the code given below. \n{context}Next line of code:\n"
_FILES = "Please complete the code given below. \n{context}{input}Next line of code:\n"

KINDS = {
    "narrativeqa": LongBenchKind("NarrativeQA", SINGLE, _STORY, 128, qa_f1),
    "qasper": LongBenchKind("Qasper", SINGLE, _ARTICLE, 128, qa_f1),
    "multifieldqa_en": LongBenchKind("MultiFieldQA-en", SINGLE, _TEXT, 64, qa_f1),
    "hotpotqa": LongBenchKind("HotpotQA", MULTI, _PASSAGES, 32, qa_f1),
    "2wikimqa": LongBenchKind("2WikiMultihopQA", MULTI, _PASSAGES, 32, qa_f1),
    "musique": LongBenchKind("MuSiQue", MULTI, _PASSAGES, 32, qa_f1),
    "gov_report": LongBenchKind("GovReport", SUMMARY, _REPORT, 512, rouge_l),
    "qmsum": LongBenchKind("QMSum", SUMMARY, _MEETING, 512, rouge_l),
    "multi_news": LongBenchKind("MultiNews", SUMMARY, _NEWS, 512, rouge_l),
    "trec": LongBenchKind("TREC", FEW_SHOT, _TYPE, 64, classification, first_line=True),
    "triviaqa": LongBenchKind("TriviaQA", FEW_SHOT, _TRIVIA, 32, qa_f1, first_line=True),
    "samsum": LongBenchKind("SAMSum", FEW_SHOT, _DIALOGUE, 128, rouge_l, True, one_line=True),
    "passage_count": LongBenchKind("PassageCount", SYNTHETIC, _COUNT, 32, count),
    "passage_retrieval_en": LongBenchKind(
        "PassageRetrieval-en", SYNTHETIC, _ABSTRACT, 32, retrieval
    ),
    "lcc": LongBenchKind("LCC", CODE, _FILE, 64, code_similarity),
    "repobench-p": LongBenchKind("RepoBench-P", CODE, _FILES, 64, code_similarity),
}
FOURTEEN = tuple(name for name, kind in KINDS.items() if kind.category != SYNTHETIC)
"""The tasks that RoPE-ID averages (App. A.8)."""
