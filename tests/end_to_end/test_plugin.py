"""Each thing that a user can add takes one file outside of the package: an encoding and a callback
while training, a task and an analysis of what was trained. The files are those CONTRIBUTING.md,
docs/encodings.md and docs/lightning.md show, used as they say."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex

import pandas as pd
import pytest
import torch

from tests.program import ROOT, run
from trainer.__main__ import main
from trainer.analysis.results import TOPICS
from trainer.checkpoint import find_checkpoint, read_state
from trainer.data.sources import TEXT_SOURCES
from trainer.evaluation.method import METHODS
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.task import TASKS
from trainer.model.backends import BACKENDS, CAUSAL
from trainer.positional.rescaling import RESCALINGS, TITLES

PAGES = ("docs/encodings.md", "docs/evaluation.md", "CONTRIBUTING.md")
GUIDE = "".join((ROOT / page).read_text() for page in PAGES)
FILES = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, re.DOTALL)
COMMANDS = {
    "measure" if "name=measures" in words else words[0]: words
    for command in re.findall(r"```sh\npython -m trainer (.*?)```", GUIDE, re.DOTALL)
    if "plugins=" in command and (words := shlex.split(command.replace("\\\n", " ")))
}
SMALL = [
    "trainer.max_steps=20", "drop.at=10", "trainer.batch_size=4", "trainer.threads=1",
    "evaluation.needles.trials=8", "evaluation.windows=4", "evaluation.fit_windows=2",
    "evaluation.lengths=[2]", "trainer.checkpoint_every=10", "~controls.nope", "~controls.rope",
]  # fmt: skip
CALLBACK = """
import lightning as L

class Counter(L.Callback):
    def on_train_batch_end(self, *_):
        with open("counted", "a") as file:
            file.write("x")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the files, and a run with the encoding and the callback."""
    directory = tmp_path_factory.mktemp("plugins")
    for name, code in FILES:
        (directory / name).write_text(code)
    (directory / "my_callbacks.py").write_text(CALLBACK)
    callback = "+callbacks.mine={_target_: my_callbacks.Counter}"
    ended = run(
        "-m", "trainer", *COMMANDS["+experiment=drope_demo"], *SMALL, callback, cwd=directory
    )
    assert ended.returncode == 0, ended.stderr
    return directory


@pytest.fixture
def command(place, monkeypatch):
    """Runs a command of the guide in that directory; what its files register is forgotten."""
    monkeypatch.chdir(place)
    registries = NEEDLE_TASKS, TASKS, METHODS, RESCALINGS, TITLES, TOPICS, TEXT_SOURCES
    before = [dict(registry) for registry in registries]
    yield lambda name, *words: main([*COMMANDS[name], *words])
    for registry, items in zip(registries, before, strict=True):
        registry.clear()
        registry.update(items)


def test_an_encoding_trains_drops_and_evaluates(place):
    run = place / "runs" / "linear"
    before = read_state(find_checkpoint(str(run / "checkpoints" / "before-drop")))
    (spectrum,) = before["layout"]["spectra"]
    slowest = 2 * math.pi / 64
    expected = [slowest * (16 - 15 * m / 15) for m in range(16)]
    assert all(math.isclose(a, b) for a, b in zip(spectrum["inv_freq"], expected, strict=True))
    assert json.loads((run / "facts.json").read_text())["drop"]["step"] == 10


def test_an_attention_backend_computes_what_sdpa_does(tmp_path, monkeypatch):
    """Also of grouped heads, after keys of a cache."""
    (tmp_path / "my_backend.py").write_text(dict(FILES)["my_backend.py"])
    monkeypatch.setitem(BACKENDS, "plain", None)
    runpy.run_path(str(tmp_path / "my_backend.py"))
    q, k, v = (torch.randn(2, heads, T, 8) for heads, T in ((4, 5), (2, 9), (2, 9)))
    expected = BACKENDS["sdpa"].attend(q, k, v, CAUSAL)
    torch.testing.assert_close(BACKENDS["plain"].attend(q, k, v, CAUSAL), expected)


def test_a_callback_is_called_at_every_batch(place):
    assert (place / "counted").read_text() == "x" * 20


def test_a_task_has_cells_in_the_table(command, place):
    command("evaluate", "evaluation.needles.trials=3")
    trials = pd.read_parquet(place / "runs/linear/lengths/niah/trials.parquet")
    colours = trials[trials.task == "colour"]
    assert colours.groupby("model").size().tolist() == [3, 3]  # before its drop, and dropped


def test_a_task_of_another_kind_a_rescaling_and_a_method_have_rows(command, place):
    command("measure")
    results = pd.read_csv(place / "runs/linear/lengths/measures/results.csv", keep_default_na=False)
    rows = results[results.task == "repeat"]
    methods = ["none", "root", "dynamic_root", "half_window"]
    assert set(rows.method) <= set(methods)
    assert {"none", "half_window"} <= set(rows.method)
    assert set(rows.n) == {4}
    page = (place / "runs/linear/lengths/measures/report.html").read_text()
    assert "root of PI" in page
    assert "Repeated tokens" in page


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+evaluation.settings.repeat.trial=3", "evaluation.settings.repeat.trial: Unexpected"),
        ("+evaluation.settings={standard_x: {}}", "evaluation.settings: expected some of"),
        ("evaluation.choice.text=statements", "evaluation.choice.text: expected some of"),
    ],
)
def test_settings_that_no_task_has_are_refused(command, capsys, word, message):
    with pytest.raises(SystemExit):
        command("measure", word)
    assert message in capsys.readouterr().err


def test_a_source_is_prepared(command, capsys):
    command("prepare")
    assert "3,000 documents" in capsys.readouterr().out


def test_an_analysis_has_a_page(command, place):
    command("analyze")
    page = place / "runs/linear/analysis/key_norms/report.html"
    assert "Norms of keys" in page.read_text()
    command("analyze", "analysis.arguments.scale=1", f"output={page.parent / 'unscaled'}")
    scaled, plain = (
        pd.read_csv(path / "results.csv") for path in (page.parent, page.parent / "unscaled")
    )
    assert scaled.value.tolist() == pytest.approx((2 * plain.value).tolist())


def test_a_file_without_the_analysis_is_refused(command, place, capsys):
    (place / "empty.py").write_text("")
    with pytest.raises(SystemExit) as error:
        command("analyze", "plugins=[empty.py]")
    assert error.value.code == 1
    assert "analysis.kind: there is no analysis 'key_norms'" in capsys.readouterr().err
