"""Extraction and comparison of final answers of worked solutions, as in MATH (Hendrycks et al.
2021)."""

from __future__ import annotations

import re


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with balanced braces, or None."""
    begin = text.rfind(r"\boxed{")
    if begin < 0:
        return None
    begin += len(r"\boxed{")
    depth = 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def final_answer(text: str) -> str:
    """Return a solution's boxed answer, or else its last number, or ""."""
    numbers = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)
    found = boxed(text)
    return found if found is not None else numbers[-1] if numbers else ""


SAME = [
    (r"\\[dt]frac", r"\\frac"),
    (r"\\text\{([^{}]*)\}", r"\1"),
    (r"\\left|\\right|\\[!,;: ]|\\?[$%]|\^\{?\\circ\}?|\s", ""),
    (r"(?<=\d),(?=\d{3}\b)", ""),
    (r"\.$", ""),
]


def normalised(answer: str) -> str:
    """Remove what only affects typography: spaces, degree and percent signs, delimiter sizes,
    thousands separators, and a final full stop."""
    for pattern, new in SAME:
        answer = re.sub(pattern, new, answer)
    return answer
