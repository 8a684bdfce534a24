"""Prompt, answer length and metric of each LongBench task.

The wording, including a misspelling, is that of the benchmark's ``dataset2prompt.json``, numbers of
tokens that of its ``dataset2maxlen.json``, metrics those of its ``eval.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.evaluation.longbench.metrics import (
    classification,
    code_similarity,
    count,
    is_code,
    qa_f1,
    retrieval,
    rouge_l,
)

SINGLE, MULTI = "Single-Document QA", "Multi-Document QA"
SUMMARY, FEW_SHOT = "Summarization", "Few-shot Learning"
SYNTHETIC, CODE = "Synthetic", "Code Completion"


@dataclass(frozen=True)
class Kind:
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
    "narrativeqa": Kind("NarrativeQA", SINGLE, _STORY, 128, qa_f1),
    "qasper": Kind("Qasper", SINGLE, _ARTICLE, 128, qa_f1),
    "multifieldqa_en": Kind("MultiFieldQA-en", SINGLE, _TEXT, 64, qa_f1),
    "hotpotqa": Kind("HotpotQA", MULTI, _PASSAGES, 32, qa_f1),
    "2wikimqa": Kind("2WikiMultihopQA", MULTI, _PASSAGES, 32, qa_f1),
    "musique": Kind("MuSiQue", MULTI, _PASSAGES, 32, qa_f1),
    "gov_report": Kind("GovReport", SUMMARY, _REPORT, 512, rouge_l),
    "qmsum": Kind("QMSum", SUMMARY, _MEETING, 512, rouge_l),
    "multi_news": Kind("MultiNews", SUMMARY, _NEWS, 512, rouge_l),
    "trec": Kind("TREC", FEW_SHOT, _TYPE, 64, classification, first_line=True),
    "triviaqa": Kind("TriviaQA", FEW_SHOT, _TRIVIA, 32, qa_f1, first_line=True),
    "samsum": Kind("SAMSum", FEW_SHOT, _DIALOGUE, 128, rouge_l, True, one_line=True),
    "passage_count": Kind("PassageCount", SYNTHETIC, _COUNT, 32, count),
    "passage_retrieval_en": Kind("PassageRetrieval-en", SYNTHETIC, _ABSTRACT, 32, retrieval),
    "lcc": Kind("LCC", CODE, _FILE, 64, code_similarity),
    "repobench-p": Kind("RepoBench-P", CODE, _FILES, 64, code_similarity),
}
FOURTEEN = tuple(name for name, kind in KINDS.items() if kind.category != SYNTHETIC)
"""The tasks that RoPE-ID averages (App. A.8)."""
