"""The runs of a sweep beside each other, from run directories made with the program's writers."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.data.streams import held_out
from trainer.__main__ import main
from trainer.common.errors import UserError
from trainer.config import CompareRequest, RunConfig
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Arm, Cell, Report
from trainer.report.sweep import terminal_sweep
from trainer.report.sweep_figures import sweep_figure
from trainer.runs.descriptions import label
from trainer.runs.directory import open_run_directory, plain
from trainer.runs.metrics_file import write_metrics
from trainer.runs.parsing import control_config, merged, parse
from trainer.runs.sweep import Swept, noting_failure, open_sweep
from trainer.workflows.compare import compare_runs, compared

TRIALS = 40
WINDOWS = 6


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hits(config, factor):
    """Of so many trials are right: more with norm, fewer at great lengths and rates."""
    norm = config.model.qk_norm.when == "always"
    return int((TRIALS if norm else TRIALS // 2) / factor - 1000 * config.optimizer.lr)


def losses(config, factor):
    """Of every window."""
    return tuple(3 + 100 * config.optimizer.lr + factor / 10 + i / 50 for i in range(WINDOWS))


def cells(config):
    length = config.training_length
    for factor in (1, 2, 4):
        where = {"model": label(config), "method": "none", "factor": float(factor)}
        right = hits(config, factor)
        scores = (1.0,) * right + (0.0,) * (TRIALS - right)
        yield Cell(task=STATEMENTS, length=factor * length, scores=scores, **where)
        windows = losses(config, factor)
        mean = sum(windows) / WINDOWS
        text = {"last_loss": mean, "by_window": windows}
        yield Cell(task=PERPLEXITY, length=factor * length, **text, **where)


def fabricate(config, steps=None, finished=True):
    """A run directory as training and evaluation leave it; its metrics by their rows."""
    done = config.trainer.max_steps if steps is None else steps
    rows = [
        {"step": s, "tokens": s * config.tokens_per_step, "phase": 0, "loss": 5 - s / 100,
         "skipped_steps": s // 4, "parameter_norm": 10.0}
        for s in range(2, done + 1, 2)
    ]  # fmt: skip
    arms = [config, *(control_config(plain(config), name) for name in config.controls)]
    for arm in arms:
        directory = open_run_directory(arm)
        write_metrics(directory / "metrics.csv", rows)
    if finished:
        Report(
            name=config.name,
            training_length=config.training_length,
            cells=tuple(cell for arm in arms for cell in cells(arm)),
            methods={"none": "as is"},
            tasks={STATEMENTS: "Statements", PERPLEXITY: "Perplexity"},
            notes=(),
            config=plain(config),
            environment={"corpus": "the same"},
            arms=tuple(
                Arm(label(arm), "rope", 1, done, done * arm.tokens_per_step) for arm in arms
            ),
        ).write(Path(config.run_dir) / "report.json")
    return rows


DIVERGED = "its weights are no numbers any more: it diverged, and its figures say nothing"
BASE = {"trainer": {"max_steps": 8, "batch_size": 4}}
WORDS = (
    "trainer.max_steps=8", "trainer.batch_size=4", "optimizer.lr=1e-3,3e-3",
    "model.qk_norm.when=never,always", "name=rate_${optimizer.lr}_${model.qk_norm.when}",
)  # fmt: skip
RATES = [(lr, norm) for lr in (0.001, 0.003) for norm in ("never", "always")]


def configured(name, **changes):
    values = merged(BASE, {"name": name, "run_dir": f"runs/{name}", **changes})
    return parse(RunConfig, values)


def swept(lr, norm):
    qk_norm = {"qk_norm": {"when": norm}}
    return configured(f"rate_{lr}_{norm}", optimizer={"lr": lr}, model=qk_norm)


def test_rows_of_a_sweep_in_progress_say_how_far_they_are(place):
    configs = [swept(*settings) for settings in RATES]
    fabricate(configs[1])
    fabricate(configs[2], steps=4, finished=False)
    made = open_sweep(
        place / "multirun",
        [Swept(c.run_dir, {"optimizer.lr": str(n)}) for n, c in enumerate(configs)],
    )
    found = compared(made)
    assert found.names == ("optimizer.lr=0", "optimizer.lr=1", "optimizer.lr=2", "optimizer.lr=3")
    assert [run.state for run in found.runs] == [
        "not started", "finished", "step 4 of 8", "not started",
    ]  # fmt: skip
    assert found.runs[2].loss == 5 - 4 / 100
    assert found.reference is found.runs[1]


def test_a_run_that_failed_shows_nothing_of_a_report_from_before(place):
    """A finished run that is started again, with more to evaluate say, and fails."""
    config = configured("again")
    fabricate(config)
    made = open_sweep(place / "multirun", [Swept(config.run_dir)])
    report = Path(config.run_dir) / "report.json"
    assert compared(made).runs[0].state == "finished"
    with pytest.raises(UserError), noting_failure(made, config.run_dir):
        raise UserError.at("evaluation", "it does not fit.")
    (note,) = (made / "failed").iterdir()
    os.utime(report, ns=(1, 1))
    (found,) = compared(made).runs
    assert (found.state, found.problem) == ("failed, step 8 of 8", "evaluation: it does not fit.")
    assert (found.reached, found.measured_on) == ((), "")
    assert found.loss == 5 - 8 / 100
    # Finished since.
    os.utime(note, ns=(1, 1))
    os.utime(report, ns=(2, 2))
    (found,) = compared(made).runs
    assert (found.state, found.problem, len(found.reached)) == ("finished", "", 3)


def test_a_run_that_failed_before_it_began_is_no_run_to_come(place):
    config = configured("unborn")
    made = open_sweep(place / "multirun", [Swept(config.run_dir)])
    assert compared(made).runs[0].state == "not started"
    with pytest.raises(OSError, match="full"), noting_failure(made, config.run_dir):
        raise OSError("full")
    (found,) = compared(made).runs
    assert (found.state, found.problem) == ("failed", "OSError: full")


@pytest.mark.parametrize(("norm", "problem"), [(10.0, ""), (math.nan, DIVERGED), (None, "")])
def test_a_run_whose_weights_are_no_numbers_is_told_from_others(place, norm, problem):
    config = configured("lone")
    fabricate(config)
    row = {"step": 8, "loss": 4.0} | ({} if norm is None else {"parameter_norm": norm})
    write_metrics(Path(config.run_dir) / "metrics.csv", [row])
    (found,) = compared(open_sweep(place / "multirun", [Swept(config.run_dir)])).runs
    assert (found.state, found.problem) == ("finished", problem)


def test_words_name_runs_only_where_all_were_jobs(place):
    """A run from elsewhere has none: then configurations say what differs."""
    configs = [configured(f"of_{seed}", seed=seed) for seed in (1, 2)]
    for config in configs:
        fabricate(config)
    runs = [Swept(configs[0].run_dir, {"optimizer.lr": "1"}), Swept(configs[1].run_dir)]
    assert compared(open_sweep(place / "multirun", runs)).names == ("seed=1", "seed=2")
    runs = [Swept(c.run_dir, {"optimizer.lr": str(n)}) for n, c in enumerate(configs)]
    made = open_sweep(place / "multirun", runs)
    assert compared(made).names == ("optimizer.lr=0", "optimizer.lr=1")
    # A sweep alone is written where it is; beside another run its runs are put.
    again, page = compare_runs(CompareRequest([str(made)]))
    assert (page.parent, len(again.runs)) == (made, 2)
    fabricate(configured("third", seed=3))
    more, page = compare_runs(CompareRequest([str(made), "runs/third"]))
    assert len(more.runs) == 3
    assert page.parent != made


def compared_by(*changes):
    """The comparison of runs with these changes to the configuration each."""
    for number, own in enumerate(changes):
        fabricate(configured(f"by_{number}", **own))
    runs = [Swept(f"runs/by_{number}") for number in range(len(changes))]
    return compared(open_sweep(Path("multirun"), runs))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([{"seed": 1}, {"seed": 2}], ("seed=1", "seed=2")),
        (
            [{}, {"seed": 2}, {"optimizer": {"lr": 0.01}}, {"optimizer": {"weight_decay": 0.2}}],
            ("RoPE", "seed=2", "optimizer.lr=0.01", "optimizer.weight_decay=0.2"),
        ),
    ],
)
def test_runs_are_named_by_what_differs_in_their_configurations(changes, names):
    assert compared_by(*changes).names == names


@pytest.mark.parametrize(("rows_left", "step"), [(3, 6), (0, 0), (None, 0)])
def test_of_metrics_that_end_before_their_run_nothing_is_shown(rows_left, step):
    """Cut short in a row, in the first one, and gone."""
    found = compared_by({"seed": 1}, {"seed": 2})
    assert [run.problem for run in found.runs] == ["", ""]
    metrics = Path("runs/by_1/metrics.csv")
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.unlink()
    if rows_left is not None:
        metrics.write_text("".join(lines[: rows_left + 1]) + lines[rows_left + 1][:9])
    whole, cut = compared(Path("multirun") / found.name).runs
    assert (whole.problem, whole.loss) == ("", 4.92)
    assert cut.problem == f"its metrics.csv ends at step {step} of 8"
    assert (cut.tokens, cut.loss, cut.skipped) == (None, None, None)
    assert cut.reached == whole.reached


def test_a_run_of_a_newer_version_is_refused(capsys):
    fabricate(configured("by_0"))
    Path("runs/by_0/run.json").write_text('{"program": "unrope", "format": 99}')
    with pytest.raises(SystemExit):
        main(["compare", "runs/by_0"])
    assert "runs: 'runs/by_0' has format 99" in capsys.readouterr().err


def test_runs_that_do_not_differ_are_named_by_their_directories():
    names = compared_by({"drop": {"at": 4}}, {"drop": {"at": 4}}).names
    assert names == ("DroPE (runs/by_0)", "DroPE (runs/by_1)")


def test_a_run_alone_stands_for_itself_and_its_controls(place):
    controls = {f"c{n}": {"label": f"c{n}", "optimizer": {"lr": n / 1000}} for n in (1, 3)}
    fabricate(configured("alone", label="first", optimizer={"lr": 0.002}, controls=controls))
    main(["compare", "runs/alone", "output=out"])
    main(["compare", "runs/alone"])
    found = compared(place / "multirun/alone")
    assert found.names == ("optimizer.lr=0.002", "optimizer.lr=0.001", "optimizer.lr=0.003")
    assert (place / "out/report.html").is_file()


def test_a_report_is_read_once_for_a_run_and_its_controls(place, monkeypatch):
    controls = {f"c{n}": {"label": f"c{n}", "optimizer": {"lr": n / 1000}} for n in (1, 3)}
    fabricate(configured("alone", label="first", optimizer={"lr": 0.002}, controls=controls))
    paths, read = [], Report.read
    monkeypatch.setattr(Report, "read", lambda path: paths.append(path) or read(path))
    main(["compare", "runs/alone"])
    assert paths == [place / "runs/alone/report.json"]


@pytest.mark.parametrize(("loss", "retrieval"), [(True, True), (True, False), (False, True)])
def test_a_figure_says_what_it_shows(loss, retrieval):
    found = compared_by({"seed": 1}, {"seed": 2})
    runs = tuple(
        replace(
            run,
            reached=[
                replace(
                    at,
                    loss=at.loss if loss else None,
                    retrieval=at.retrieval if retrieval else None,
                )
                for at in run.reached
            ],
        )
        for run in found.runs
    )
    (plan,) = sweep_figure(replace(found, runs=runs))
    assert ("loss" in plan.caption, "loss" in plan.alt.lower()) == (loss, loss)
    assert ("etrieval" in plan.caption, "etrieval" in plan.alt) == (retrieval, retrieval)
    assert plan.caption.endswith("Bars: 95% intervals over trials.") == retrieval


class Page(HTMLParser):
    """What a page refers to, and the texts of its first table's rows."""

    def __init__(self, text):
        super().__init__()
        self.links, self.sources, self.rows = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.links += [named["href"]] if "href" in named else []
        self.sources += [named["src"]] if "src" in named else []
        assert tag not in ("script", "link")
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.rows and data.strip():
            self.rows[-1].append(data.strip())


NO_RUN = "runs: 'runs/alons' is no run (it has no config.yaml), nor a sweep (sweep.json)."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "runs: give run directories"),
        (["runs/x"], "runs: there is no directory 'runs/x'. Looked in '"),
        (["runs/alons"], NO_RUN),
        (["multirun/broken"], "runs: 'multirun/broken/sweep.json' is damaged"),
        (["run=x", "runs=[a]"], "run: unknown key. Did you mean 'runs'?"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(words, said, place, capsys):
    (place / "multirun/broken").mkdir(parents=True)
    (place / "runs/alone").mkdir(parents=True)
    (place / "runs/alons").touch()  # is as near, and no directory
    (place / "multirun/broken/sweep.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_the_nearest_directory_is_suggested_and_where_it_was_looked_for_is_named(place, capsys):
    (place / "runs/alone").mkdir(parents=True)
    (place / "runs/alons").touch()  # is as near, and no directory
    with pytest.raises(SystemExit):
        main(["compare", "runs/alon"])
    assert capsys.readouterr().err == (
        "error: runs: there is no directory 'runs/alon'. "
        f"Looked in {str(place / 'runs')!r}. Did you mean 'runs/alone'?\n"
    )


OTHER = {
    "enabled": False, "quick": True, "layers": "all", "tasks": [PERPLEXITY], "windows": 5,
    "last": 8, "batch_tokens": 4096,
    "dtype": "bf16", "fit_windows": 3, "needles": {"trials": 5}, "ruler": {"trials": 5},
    "longbench": {"limit": 5}, "many_shot": {"trials": 5}, "temperature": {"grid": [0.1]},
    "dynamic_ntk": {"alpha": 2.0}, "longrope": {"seed": 1}, "choice": {"texts": 2},
    "dope": {"heads": 2}, "weighted_rope": [{"tau": 0.5}],
}  # fmt: skip
"""Another value of every setting of an evaluation, but for methods and lengths."""
LENGTHS = {"lengths": [1, 2, 4, 8]}


def held_against_each_other(found):
    """Whether each pair of figures of the second run is held against the first one's."""
    run = found.runs[1]
    return [found.comparison(run, 1.0) is not None, found.loss_change(run, 1.0) is not None]


@pytest.mark.parametrize("key", OTHER)
def test_runs_measured_with_other_settings_are_not_tested_against_each_other(place, key):
    changed = {"seed": 2, "evaluation": {key: OTHER[key]}}
    assert held_against_each_other(compared_by({"seed": 1}, changed)) == [False, False]


def test_the_windows_of_a_length_end_elsewhere_with_another_longest_length():
    """Why lengths are a part of what is compared."""
    text = held_out(np.arange(1000))

    def ends(lengths):
        return windows_with_common_ends(text, 4, lengths)[8][:, -1].tolist()

    assert ends([8, 16, 64]) == ends([8, 64])
    assert ends([8, 64]) != ends([8, 128])


def test_runs_measured_on_other_text_are_not_tested_against_each_other(place):
    found = compared_by({"seed": 1}, {"seed": 2})
    assert held_against_each_other(found) == [True, True]
    path = Path("runs/by_1/report.json")
    path.write_text(path.read_text().replace('"the same"', '"another"'))
    assert held_against_each_other(compared(Path("multirun") / found.name)) == [False, False]


@pytest.mark.parametrize(("precision", "paired"), [("fp32", True), ("tf32", False)])
def test_runs_measured_in_other_precisions_are_not_tested_against_each_other(
    place, precision, paired
):
    """Reports of earlier versions say fp32 in their settings, later ones what it came to."""
    earlier, chunks = {"dtype": "fp32"}, {"prefill_chunk": 512}
    found = compared_by({"seed": 1, "evaluation": earlier}, {"seed": 2, "evaluation": chunks})
    path = Path("runs/by_1/report.json")
    named = f'"the same", "precision": "{precision}"'
    path.write_text(path.read_text().replace('"the same"', named))
    again = compared(Path("multirun") / found.name)
    assert held_against_each_other(again) == [paired] * 2


@pytest.mark.parametrize("lengths", [1, 4, 9])
def test_a_table_fits_a_terminal(lengths, place):
    found = compared_by({"seed": 1}, {"seed": 2})
    at = found.runs[0].reached[0]
    many = tuple(replace(at, length=64 << n, factor=2.0**n) for n in range(lengths))
    runs = tuple(replace(run, reached=many, settings={"a" * 70: "b" * 70}) for run in found.runs)
    for width in (80, 100):
        out = Console(width=width, record=True, file=StringIO())
        out.print(terminal_sweep(replace(found, runs=runs), width))
        text = out.export_text()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        assert len(re.findall(r"\d+ tokens", text)) == lengths
