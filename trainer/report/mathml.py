"""Convert formulas in plain text with Unicode signs to MathML, which browsers render."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿʲˡʳᶜᵀ′", "0123456789+−()njlrcT′", strict=True))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉ᵢⱼₖₙₘₜ", "0123456789ijknmt", strict=True))
CLOSING = {"(": ")", "[": "]", "{": "}", "⟨": "⟩", "⌊": "⌋"}
FUNCTIONS = {"cos", "exp", "log", "tr"}
"""Functions whose argument may follow without brackets."""

_TOKEN = re.compile(r"\s+|\d+(?:[.,]\d+)*|[A-Za-z]\u0304|[A-Za-z][A-Za-z'’]*|.", re.DOTALL)
_REMARK = re.compile(r"[^=]*: ")
_WORD = "<mtext>"
_FACTORS = "‖|…"  # signs that can be part of a fraction


@dataclass(frozen=True)
class _Part:
    """A sign, name, bracketed group or word of a formula.

    ``factor``: whether it can be part of a fraction. ``inner``: content of brackets. ``spaced``:
    whether a space precedes it.
    """

    xml: str
    factor: bool = True
    inner: str | None = None
    spaced: bool = False


def mathml(text: str) -> str:
    """Convert a formula; remarks such as ``R: the rotation``, after two spaces, stay text.

    ``a_i``, ``a_{ij}`` and subscript signs are indices; ``^`` and superscript signs are exponents.
    ``a / b`` is a fraction of everything up to the next relation, sum or word; ``a/b`` one of the
    parts that touch the slash. All other signs are escaped.
    """
    first, *others = re.split(r"(?<=\S)\s{2,}", text)
    shown = (escape(part) if _REMARK.match(part) else _formula(part) for part in others)
    return "&ensp; ".join([_formula(first), *shown])


def _formula(text: str) -> str:
    parts = _parts(deque(_TOKEN.findall(text)), "")
    return f"<math>{_joined(parts)}</math>"


def _next(tokens: deque[str]) -> str:
    return tokens[0] if tokens else ""


def _parts(tokens: deque[str], closing: str) -> list[_Part]:
    """Return the parts up to the closing bracket or the end, with fractions."""
    parts: list[_Part] = []
    spaced = False
    while tokens and (token := tokens.popleft()) != closing:
        if token.isspace():
            spaced = True
            continue
        parts.append(replace(_scripted(_part(token, tokens), tokens), spaced=spaced))
        spaced = False
    return _with_fractions(parts)


def _part(token: str, tokens: deque[str]) -> _Part:
    closing = CLOSING.get(token, "")
    if closing and closing in tokens:
        inner = _joined(_parts(tokens, closing))
        tall = "<mfrac>" in inner
        xml = f"<mrow>{_sign(token, tall)}{inner}{_sign(closing, tall)}</mrow>"
        return _Part(xml, inner=inner if token in "({" else None)
    if token == "√" and _next(tokens).strip():
        under = _scripted(_part(tokens.popleft(), tokens), tokens)
        return _Part(f"<msqrt>{under.inner or under.xml}</msqrt>")
    if token[0].isdigit() and token not in {**RAISED, **LOWERED}:
        return _Part(f"<mn>{token}</mn>")
    if token[0].isalpha():
        alone = len(token.rstrip("\u0304")) > 1 and token not in FUNCTIONS
        if alone and _next(tokens) not in (*LOWERED, "_", "("):
            return _Part(f"{_WORD}{escape(token)}</mtext>", factor=False)
        return _Part(f"<mi>{escape(token)}</mi>")
    return _Part(_sign(token), factor=token in _FACTORS)


def _sign(token: str, stretches: bool = False) -> str:
    """Return a sign; ``stretches``: whether it is as high as what it encloses."""
    close = ' lspace="0" rspace="0"' if token in _FACTORS else ""
    return f'<mo stretchy="{"true" if stretches else "false"}"{close}>{escape(token)}</mo>'


def _scripted(base: _Part, tokens: deque[str]) -> _Part:
    """Return a part with the indices and exponents that follow it."""
    below, above = "", ""
    while True:
        sign = _next(tokens)
        if sign in ("_", "^") and len(tokens) > 1:
            tokens.popleft()
            argument = _part(tokens.popleft(), tokens)
            script = argument.inner or argument.xml.replace("mtext>", "mi>")
        elif sign and sign in RAISED:
            script = _sign(RAISED[tokens.popleft()]) if sign in "⁺⁻⁽⁾′" else _small(tokens, RAISED)
        elif sign and sign in LOWERED:
            script = _small(tokens, LOWERED)
        else:
            break
        if sign == "_" or sign in LOWERED:
            below += script
        else:
            above += script
    if not (below or above):
        return base
    rows = "".join(f"<mrow>{script}</mrow>" for script in (below, above) if script)
    kind = "msubsup" if below and above else "msub" if below else "msup"
    return _Part(f"<{kind}><mrow>{base.xml}</mrow>{rows}</{kind}>")


def _small(tokens: deque[str], signs: dict[str, str]) -> str:
    sign = signs[tokens.popleft()]
    return f"<mn>{sign}</mn>" if sign.isdigit() else f"<mi>{sign}</mi>"


def _with_fractions(parts: list[_Part]) -> list[_Part]:
    stroke, joined, at = _sign("/"), list[_Part](), 0
    while at < len(parts):
        part = parts[at]
        if part.xml == stroke:
            above = list(_factors(joined[::-1], tight=not part.spaced, backwards=True))[::-1]
            below = list(_factors(parts[at + 1 :], tight=not part.spaced, backwards=False))
            if above and below:
                del joined[-len(above) :]
                rows = "".join(f"<mrow>{_bare(side)}</mrow>" for side in (above, below))
                joined.append(_Part(f"<mfrac>{rows}</mfrac>", spaced=above[0].spaced))
                at += 1 + len(below)
                continue
        joined.append(part)
        at += 1
    return joined


def _factors(parts: Sequence[_Part], *, tight: bool, backwards: bool) -> Iterator[_Part]:
    """Yield the parts next to the slash that belong to the fraction."""
    for number, part in enumerate(parts):
        if not part.factor or (tight and not backwards and number and part.spaced):
            return
        if part.xml == _sign("/"):
            return
        yield part
        if tight and backwards and part.spaced:
            return


def _bare(side: Sequence[_Part]) -> str:
    """Return one side of a fraction without redundant brackets."""
    (first, *others) = side
    return first.inner if first.inner is not None and not others else _joined(side)


def _joined(parts: Sequence[_Part]) -> str:
    """Join parts, with a narrow space between factors and a wide one beside words."""
    xml, before = "", None
    for part in parts:
        if part.spaced and before is not None:
            beside_word = any(neighbour.xml.startswith(_WORD) for neighbour in (part, before))
            if beside_word or (part.factor and before.factor):
                xml += f'<mspace width="{".4" if beside_word else ".2"}em"></mspace>'
        xml, before = xml + part.xml, part
    return xml
