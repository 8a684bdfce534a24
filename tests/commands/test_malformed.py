"""Whatever a command is given: one message that says what is wrong, exit code 2, nothing left.

All run in this process, with 2 GiB of memory more than it has, on one trained run that each gets as
it is or in a damaged copy.
"""

from __future__ import annotations

import itertools
import json
import re
import resource
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from tests.commands.malformed import files, runs, words
from trainer.__main__ import main
from trainer.commands.hydra.composing import compose_words
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.train import read_run
from trainer.data.corpus import prepare_corpus
from trainer.runs.directory import open_run_directory
from trainer.runs.metrics_file import continue_metrics
from trainer.runs.saved_state import read_run_state
from trainer.training.run import train

MEMORY, SECONDS = 2 << 30, 20
SAID = ("log.txt", ".lock", "config.yaml")
"""Files in which a run says of itself what it does, and with what."""


@pytest.fixture(scope="module")
def source(base, tmp_path_factory):
    """A directory with a trained run, its experiment, and what the tables name."""
    place = tmp_path_factory.mktemp("malformed")
    trainer = {**base["trainer"], "keep_checkpoints": 2, "checkpoint_every": 9}
    values = {**base, "trainer": trainer, "evaluation": {"enabled": False}}
    (place / "own" / "experiment").mkdir(parents=True)
    experiment = f"# @package _global_\n{yaml.safe_dump(values)}"
    (place / "own" / "experiment" / "tiny.yaml").write_text(experiment)
    composed = compose_words(
        ["+experiment=tiny", f"run_dir={place / 'run'}"], files=ConfigFiles(place / "own")
    )
    config = read_run(composed)
    open_run_directory(config)
    train(config, prepare_corpus(config.data, config.tokenizer))
    shutil.copytree(place / "run", place / "begun")
    shutil.rmtree(place / "begun" / "checkpoints" / "step-000012")
    continue_metrics(place / "begun" / "metrics.csv", 9)
    shutil.rmtree(place / "run" / "checkpoints" / "step-000009")
    (place / "text.txt").write_text("Three short words.")
    (place / "lines.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(90)))
    (place / "list.json").write_text("[1, 2]")
    seven = {"long_factor": [2.0] * 7, "short_factor": [1.0] * 7}
    (place / "seven.json").write_text(json.dumps(seven))
    (place / "empty.txt").touch()
    (place / "broken.py").write_text("1 / 0")
    (place / "others").mkdir()
    (place / "others" / "notes.md").write_text("Of somebody else.")
    (place / "dangling").symlink_to("nowhere")
    (place / "circle").symlink_to("circle")
    return place


@pytest.fixture(scope="module", autouse=True)
def bounds():
    """Memory for all of them."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    torch.set_num_threads(1)


def too_long(*_):
    raise TimeoutError(f"longer than {SECONDS} seconds")


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a command line in a directory; its one message, once it has changed nothing there."""

    def go(place, line, several=False, cache="cache"):
        monkeypatch.chdir(place)
        monkeypatch.setenv("UNROPE_CACHE", cache)
        before = files_of(place)
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(SECONDS)
        try:
            with pytest.raises(SystemExit) as stop:
                main([word.replace("⏎", "\n") for word in shlex.split(line)])
        finally:
            signal.alarm(0)
        said = capsys.readouterr().err
        assert stop.value.code == 2, said
        assert "Traceback" not in said
        assert said.count("error:") == 1 or several, said
        after = files_of(place)
        assert not [name for name in {*before, *after} if before.get(name) != after.get(name)]
        assert not Path("harm").exists()
        return said.partition("error: ")[2]

    return go


def files_of(place):
    """What lies there, but for caches and what a run says of itself."""
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in sorted(place.rglob("*"))
        if {"cache", "__pycache__"}.isdisjoint(path.parts) and path.name not in SAID
    }


def rows(table):
    """Command lines and what they must say."""
    split = (line.rpartition(" | ") for line in table.strip().splitlines())
    return [(line.strip(), said.strip()) for line, _, said in split]


@pytest.mark.parametrize(("line", "said"), rows(words.RUN))
def test_a_wrong_configuration_of_a_run(source, refused, line, said):
    assert said in refused(source, line)


SHORT = "data.validation=0.0005 positional=nope evaluation.methods=[none,temperature]"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{SHORT} evaluation.lengths=[1,8]", "evaluation.lengths: the validation text has"),
        (
            f"{SHORT} evaluation.lengths=[1,2] evaluation.temperature.lengths=[64]",
            "evaluation.temperature.lengths: the validation text has",
        ),
        (
            "model.from_run=run data.sequence_length=16 evaluation.lengths=[1,9000]",
            "window of 144000",
        ),
        ("evaluation.tasks=[longbench]", "THUDM/LongBench is not on this machine"),
        (
            "evaluation.longrope.factors=seven.json evaluation.methods=[none,longrope]",
            "expected 16 factors, one for each pair",
        ),
    ],
)
def test_an_evaluation_that_would_fail_after_training(source, refused, line, said):
    assert said in refused(source, line)


@pytest.mark.parametrize(("line", "said"), rows(words.FINISHED))
def test_a_wrong_request(source, refused, line, said):
    assert said in refused(source, line.replace("RUN", "run"))


READERS = {
    "evaluate": "evaluate checkpoint=hurt evaluation.lengths=[1] evaluation.windows=1 threads=1",
    "analyze": "analyze checkpoint=hurt +analysis=sinks threads=1",
    "generate": "generate checkpoint=hurt prompt=a max_new_tokens=1 threads=1",
    "export": "export checkpoint=hurt to=out threads=1",
    "inspect": "inspect checkpoint=hurt",
}
RESUME = "--config-dir own +experiment=tiny run_dir=hurt evaluation.enabled=true"


@pytest.fixture(scope="module")
def saved(source, tmp_path_factory):
    """A place with the experiment, where damaged copies of the run come and go."""
    place = tmp_path_factory.mktemp("damaged")
    shutil.copytree(source / "own", place / "own")
    return place


@pytest.fixture
def damaged(source, saved, refused):
    """Harms a copy of the run, and gives it to a command."""

    def go(harm, line):
        shutil.rmtree(saved / "hurt", ignore_errors=True)
        shutil.copytree(source / ("begun" if line is RESUME else "run"), saved / "hurt")
        harm(saved / "hurt")
        return refused(saved, line)

    return go


def spread(harms, commands=tuple(READERS)):
    """Every harm for one command, and all commands for the harms of a kind."""
    return [
        pytest.param(harm, command, id=f"{name}-{command}")
        for (name, harm), command in zip(harms.items(), itertools.cycle(commands), strict=False)
    ]


def values(table):
    """Descriptions with one other value."""
    return {
        f"{place}={value!r:.24}": runs.state_with(place, value)
        for place, values in table
        for value in values
    }


TEXTS = [*runs.NO_JSON, *runs.NO_TEXT]
LOADERS = ("evaluate", "analyze", "generate", "export")
DESCRIPTIONS = {
    **values(runs.STATE),
    **{f"{text!r:.12}": runs.content("state.json", text) for text in TEXTS},
}
MANIFESTS = {
    **{kind: runs.content("manifest.json", text) for kind, text in runs.FILES.items()},
    **{f"{text!r:.12}": runs.content("manifest.json", text) for text in TEXTS},
}
INDEXES = {
    **{kind: runs.content(".metadata", data) for kind, data in runs.INDEXES.items()},
    **{kind: runs.index_with(change) for kind, change in runs.CHANGES.items()},
}
IN_CHECKPOINT = {
    **{f"no {name}": runs.missing(name) for name in ("state.json", ".metadata", "__0_0.distcp")},
    **{f"{name} is a pipe": runs.pipe_at(name) for name in runs.IN_CHECKPOINT[:4]},
    **{f"{name} is a directory": runs.directory_at(name) for name in runs.IN_CHECKPOINT[:4]},
    "weights that are none": runs.content("__0_0.distcp", b"weights"),
    "weights that are zeros": runs.content("__0_0.distcp", bytes(1 << 20)),
}
IN_RUN = {
    **{f"run.json {text!r:.20}": runs.content("run.json", text) for text in runs.MARKS},
    **{f"config.yaml {text!r:.20}": runs.content("config.yaml", text) for text in runs.CONFIGS},
    **{f"metrics.csv {text!r:.20}": runs.content("metrics.csv", text) for text in runs.METRICS},
    **{f"report.json {text!r:.12}": runs.content("report.json", text) for text in TEXTS},
    **{
        f"{name} is a directory": runs.directory_at(name) for name in ("config.yaml", "metrics.csv")
    },
    **{f"{name} is a pipe": runs.pipe_at(name) for name in ("run.json", "config.yaml")},
}


@pytest.mark.parametrize(("harm", "command"), spread(DESCRIPTIONS))
def test_a_description_that_is_damaged(damaged, harm, command):
    said = damaged(harm, READERS[command])
    assert said.startswith("checkpoint: ")
    assert "step-000012" in said


@pytest.mark.parametrize(("harm", "command"), spread(MANIFESTS))
def test_a_manifest_that_is_damaged(damaged, harm, command):
    said = damaged(harm, READERS[command])
    assert re.search("manifest.json|is missing", said)
    assert "step-000012" in said


@pytest.mark.parametrize(("harm", "command"), spread(INDEXES, LOADERS))
def test_an_index_that_is_none_or_would_run_code(damaged, harm, command):
    assert "step-000012" in damaged(harm, READERS[command])


@pytest.mark.parametrize(("harm", "command"), spread(IN_CHECKPOINT, LOADERS))
def test_a_checkpoint_whose_files_are_others(damaged, harm, command):
    assert "step-000012" in damaged(harm, READERS[command])


@pytest.mark.parametrize("harm", values(runs.RESUMED).values(), ids=values(runs.RESUMED))
def test_a_state_that_training_cannot_go_on_from(damaged, harm):
    assert re.match("checkpoint: |data: ", damaged(harm, RESUME))


def test_the_same_state_as_it_was_written_goes_on(damaged):
    """What is refused here is the harm that is done to it."""
    assert re.match("checkpoint: .*step: 5", damaged(runs.state_with("step", 5), RESUME))
    state = json.loads((runs.newest(Path("hurt")) / "state.json").read_text())
    read_run_state(Path("step-000009"), {**state, "step": 9})


@pytest.mark.parametrize("kind", IN_RUN)
def test_a_run_directory_that_is_damaged(damaged, kind):
    said = damaged(IN_RUN[kind], RESUME)
    assert said.startswith("run_dir: ")
    assert "hurt" in said


@pytest.mark.parametrize(
    ("key", "line"),
    [
        *[("checkpoint", line) for line in READERS.values()],
        ("compare", "evaluate checkpoint=run compare=[hurt] threads=1"),
        (
            "model.from_run",
            "--config-dir own +experiment=tiny drop.enabled=false model.from_run=hurt",
        ),
    ],
    ids=[*READERS, "compare", "from_run"],
)
@pytest.mark.parametrize("mark", ["{", '{"program": "unrope", "format": 99}'])
def test_a_damaged_run_is_named_by_the_key_that_named_it(damaged, source, key, line, mark):
    line = line.replace("checkpoint=run", f"checkpoint={source / 'run'}")
    assert damaged(runs.content("run.json", mark), line).startswith(f"{key}: 'hurt")


def test_a_damaged_run_among_several_that_are_compared(damaged):
    said = damaged(runs.content("config.yaml", "{"), "compare hurt")
    assert said.startswith("runs: 'hurt/config.yaml' is damaged")


@pytest.mark.parametrize("text", runs.TEMPERATURES, ids=lambda text: repr(text)[:40])
def test_a_temperature_that_is_none(damaged, text):
    said = damaged(runs.content("temperature.json", text, vouched=False), READERS["generate"])
    assert "holds no temperature" in said


OWN = "--config-dir conf +experiment=own"


@pytest.mark.parametrize("kind", files.GROUPS)
def test_a_group_of_a_user_that_is_damaged(tmp_path, refused, kind):
    content, said = files.GROUPS[kind]
    files.group(tmp_path, content)
    assert said in refused(tmp_path, f"prepare {OWN}")


def test_an_experiment_without_its_first_line(tmp_path, refused):
    content, said = files.NO_MARK
    files.group(tmp_path, content)
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(content)
    assert said in refused(tmp_path, f"prepare {OWN}")


@pytest.mark.parametrize("name", files.TEXTS)
def test_text_that_is_none(tmp_path, refused, name):
    content, said = files.TEXTS[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in refused(tmp_path, f"prepare data=files data.files=[{name}]", several=True)


@pytest.mark.parametrize("kind", files.MODELS)
def test_a_configuration_of_a_published_model(tmp_path, refused, kind):
    config, said = files.MODELS[kind]
    files.model(tmp_path, config, weights=files.NO_TENSORS)
    assert said in refused(tmp_path, "generate checkpoint=published prompt=a", several=True)


@pytest.mark.parametrize("kind", files.WEIGHTS)
def test_weights_of_a_published_model(tmp_path, refused, kind):
    weights, said = files.WEIGHTS[kind]
    files.model(tmp_path, weights=weights)
    assert said in refused(tmp_path, "generate checkpoint=published prompt=a", several=True)


@pytest.mark.parametrize("kind", files.INDEXES)
def test_an_index_of_published_weights(tmp_path, refused, kind):
    index, said = files.INDEXES[kind]
    files.model(tmp_path, index=index)
    assert said in refused(tmp_path, "generate checkpoint=published prompt=a", several=True)


PLACES = """
UNROPE_CACHE=text.txt | 'text.txt
UNROPE_CACHE=/proc/cache | /proc/cache
UNROPE_CACHE=text.txt/below | text.txt
UNROPE_CACHE=circle | circle
"""


@pytest.mark.parametrize(("place", "said"), rows(PLACES))
def test_a_cache_that_is_no_place(source, refused, place, said):
    words = "prepare data=files data.files=[lines.jsonl]"
    assert said in refused(source, words, cache=place.partition("=")[2])
