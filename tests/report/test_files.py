"""Pages from templates, and CSV."""

from __future__ import annotations

import pytest
from jinja2 import DictLoader, UndefinedError

from trainer.common.files import csv_text
from trainer.report import files
from trainer.report.files import base64, render


@pytest.fixture
def template(monkeypatch):
    """Set a text as if it were one of the templates."""

    def given(text, filters=None, **values):
        monkeypatch.setattr(files, "PackageLoader", lambda _: DictLoader({"a": text}))
        return render("a", filters or {}, **values)

    return given


def test_what_is_filled_in_is_escaped(template):
    assert template("<p>{{ x }}</p>", x="<b> & c") == "<p>&lt;b&gt; &amp; c</p>"


def test_what_is_not_given_is_a_mistake(template):
    with pytest.raises(UndefinedError, match="'x' is undefined"):
        template("{{ x }}")


def test_lines_of_tags_leave_nothing(template):
    assert template("a\n  {% if x %}\nb\n  {% endif %}\nc", x=True) == "a\nb\nc"


def test_filters_are_there(template):
    assert template("{{ x | mathml | safe }}", x="a/b").startswith("<math><mfrac>")
    assert template("{{ x | pretty | safe }}", x={"é": [1]}) == '{\n  "é": [\n    1\n  ]\n}'
    assert template("{{ x | twice }}", {"twice": lambda x: 2 * x}, x=3) == "6"


def test_csv_quotes_what_needs_it_and_ends_every_line():
    rows = [("a,b", 'c"d'), (1, None)]
    assert csv_text(("x", "y"), rows) == 'x,y\n"a,b","c""d"\n1,\n'


def test_a_file_as_an_address(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00\xff")
    assert base64(tmp_path / "a") == "AP8="
