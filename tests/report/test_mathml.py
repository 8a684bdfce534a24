"""Formulas: what is a fraction, an index, an exponent, a word."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.report.mathml import mathml


def plain(node):
    """What a tree says, in words of LaTeX's kind without its backslashes."""
    parts = [plain(child) for child in node]
    if node.tag == "mfrac":
        return f"frac[{parts[0]}][{parts[1]}]"
    if node.tag == "msqrt":
        return f"sqrt[{''.join(parts)}]"
    if node.tag in ("msub", "msup", "msubsup"):
        scripts = zip({"msub": "_", "msup": "^", "msubsup": "_^"}[node.tag], parts[1:], strict=True)
        return parts[0] + "".join(f"{sign}[{part}]" for sign, part in scripts)
    if node.tag == "mspace":
        return " "
    return (node.text or "") + "".join(parts)


def read(text):
    (formula,) = re.findall("<math>.*?</math>", mathml(text))
    return plain(ElementTree.fromstring(formula))


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        ("a / b + c", "frac[a][b]+c"),
        ("c = (a + b) / (2 d)", "c=frac[a+b][2 d]"),
        ("⟨x, y⟩ / (‖x‖ ‖y‖)", "frac[⟨x,y⟩][‖x‖ ‖y‖]"),
        ("1/T Σᵢ c_ij α_ij", "frac[1][T] Σ_[i] c_[ij] α_[ij]"),
        ("z²/2n ± z √(p(1 − p)/n)", "frac[z^[2]][2n]±z sqrt[frac[p(1−p)][n]]"),
        ("π + θ C / 2", "π+frac[θ C][2]"),
        ("mean over i of a_i / b_i", "mean over i of frac[a_[i]][b_[i]]"),
        ("‖qₙ⁽ʲ⁾‖₂", "‖q_[n]^[(j)]‖_[2]"),
        ("softmax_j(q)₁", "softmax_[j](q)_[1]"),
        ("Σ_{j≤i} R^δ v", "Σ_[j≤i] R^[δ] v"),
        ("q̄ / k̄", "frac[q̄][k̄]"),
        ("|k|", "|k|"),
        ("a < b & c", "a<b&c"),
        ("(a", "(a"),
        ("/ a", "/a"),
    ],
)
def test_a_formula_is_read_as_it_is_meant(text, read_as):
    assert read(text) == read_as


@pytest.mark.parametrize(
    ("text", "xml"),
    [
        # Numbers, names, words and signs have elements of their own.
        (
            "x₁ⱼ²ⁿ′",
            "<msubsup><mrow><mi>x</mi></mrow><mrow><mn>1</mn><mi>j</mi></mrow>"
            '<mrow><mn>2</mn><mi>n</mi><mo stretchy="false">′</mo></mrow></msubsup>',
        ),
        ("1,024.5", "<mn>1,024.5</mn>"),
        ("cos x", '<mi>cos</mi><mspace width=".2em"></mspace><mi>x</mi>'),
        ("mean x", '<mtext>mean</mtext><mspace width=".4em"></mspace><mi>x</mi>'),
        ("x mean", '<mi>x</mi><mspace width=".4em"></mspace><mtext>mean</mtext>'),
        ("x = y", '<mi>x</mi><mo stretchy="false">=</mo><mi>y</mi>'),
        ("mean_i", "<msub><mrow><mi>mean</mi></mrow><mrow><mi>i</mi></mrow></msub>"),
        ("a_{ij}", "<msub><mrow><mi>a</mi></mrow><mrow><mtext>ij</mtext></mrow></msub>"),
        ("a^b", "<msup><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></msup>"),
        (
            "‖x‖",
            '<mo stretchy="false" lspace="0" rspace="0">‖</mo><mi>x</mi>'
            '<mo stretchy="false" lspace="0" rspace="0">‖</mo>',
        ),
        ("√", '<mo stretchy="false">√</mo>'),
        ("a_", '<mi>a</mi><mo stretchy="false">_</mo>'),
        (
            "a b/c d",
            (
                '<mi>a</mi><mspace width=".2em"></mspace>'
                "<mfrac><mrow><mi>b</mi></mrow><mrow><mi>c</mi></mrow></mfrac>"
                '<mspace width=".2em"></mspace><mi>d</mi>'
            ),
        ),
        (
            "a / b / c",
            (
                "<mfrac><mrow><mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac></mrow>"
                "<mrow><mi>c</mi></mrow></mfrac>"
            ),
        ),
    ],
)
def test_every_part_has_its_mathml_element(text, xml):
    assert mathml(text) == f"<math>{xml}</math>"


def test_a_remark_stays_text_and_is_escaped():
    shown = mathml("r = σ₁(R X) / σ₁(X),  R: the <rotation>")
    assert shown.endswith("</math>&ensp; R: the &lt;rotation&gt;")


@given(st.text(alphabet="ab1 /()[]⟨_^√²ᵢ‖=−,:<&\u0304Σ word", max_size=30))
def test_any_text_becomes_well_formed_xml(text):
    for formula in re.findall("<math>.*?</math>", mathml(text)):
        ElementTree.fromstring(formula)


@pytest.mark.parametrize(
    ("text", "stretched"), [("softmax_j(⟨q_i, k_j⟩ / √d)₁", "()"), ("(a + b) c", "")]
)
def test_brackets_are_as_high_as_the_fraction_that_they_enclose(text, stretched):
    assert "".join(re.findall('<mo stretchy="true">(.)</mo>', mathml(text))) == stretched
