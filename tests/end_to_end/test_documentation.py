"""Every command that the README and the documentation show runs, on a small budget."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import write_keys
from tests import program
from tests.program import ROOT
from trainer.evaluation.methods import known_methods
from trainer.evaluation.tasks import TASKS
from trainer.positional.rescaling import RESCALINGS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = "CONTRIBUTING.md", "CHANGELOG.md", "slurm/README.md"
LINKING = [*PAGES, *(ROOT / name for name in OTHERS)]
FREE_NAMES = "positional.encodings.", "positional.heads.", "phases.", "data.arguments."
"""Groups whose keys users name."""
TRAIN = [
    "trainer.max_steps=8", "trainer.batch_size=4", "trainer.micro_batch_size=2",
    "trainer.threads=1", "drop.effect_sequences=2", "evaluation.lengths=[2]",
    "evaluation.needles.trials=2", "evaluation.windows=1", "evaluation.fit_windows=1",
    "evaluation.temperature.coefficient=0.1", "benchmarks.limit=2",
]  # fmt: skip
LENGTHS = [
    "evaluation.windows=2", "evaluation.fit_windows=1",
    "evaluation.needles.trials=2", "evaluation.longrope.evaluations=2",
]  # fmt: skip
ONLY_READ = ["--cfg", "job"]
BUDGETS = {
    # Real weights take minutes. tests/workflows/test_experiments.py trains the experiment
    # with small ones; tests/interchange reads and exports small ones.
    "+experiment=drope_smollm2_135m_local": ONLY_READ,
    "runs/drope_smollm2_135m_local": ONLY_READ,
    "runs/rope_id_ablation_demo": ONLY_READ,
    # Measures a real model; tests/workflows/test_recalibrate.py runs it on a tiny one.
    "recalibrate": ["--help"],
    "model=llama_135m": ONLY_READ,  # for a GPU
    **{word: [] for word in ("--help", "--cfg", "generate", "export")},
    **{word: [] for word in ("prepare", "compare")},
    "plan": ["model.num_hidden_layers=1"],
    **{
        f"checkpoint=runs/{name}": ONLY_READ
        for name in (
            *("extension_demo", "extension_demo/controls/rope", "rope_swa"),
            "rope_id_ablation_demo",
        )
    },
    "analysis=synthetic,matrix_entropy": [],
    "analyze": ["analysis.length=128", "analysis.texts=2"],
    "+evaluation=multiple_choice": ["evaluation.limit=2"],
    "+evaluation=extension": [*LENGTHS, "evaluation.lengths=[1,2]"],
    "evaluate": LENGTHS,
}  # fmt: skip
"""What is added to a command that holds the word; of several words to the first."""
READ_EXPERIMENTS = r"\+experiment=(ladder\w*|(?!drope_)\w+_demo)"
"""Trained and evaluated by tests/workflows/test_experiments.py."""
ALONE = ["~controls.rope", "~controls.nope"]
"""Demos of another name train without the controls, which the demo itself has."""
TRAINED = ["evaluation.enabled=false"]
"""Runs of another name are evaluated only by commands that do so."""
SWEPT = ["evaluation.methods=[none]"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
"""Replaced by two forked processes; tests/end_to_end/test_resume.py starts it itself."""
BENCHMARK = [
    "--precision=fp32", "--vocab=64", "--length=64", "--warmup=0", "--repeats=1", "--no-compiled",
    "--no-memory", "--threads=1",
]  # fmt: skip
SCRIPTS = {
    "scripts/benchmark_training.py": BENCHMARK,
    "scripts/benchmark_generation.py": [
        *("--quick", "--threads=1", "--batch=1", "--new=2", "--repeats=1")
    ],
    "scripts/benchmark_needles.py": ["--trials=1", "--depths", "0.5", "--rounds=1", "--threads=1"],
    "scripts/benchmark_perplexity.py": ["--lengths", "512", "--models", "NoPE"],
    "scripts/fetch_smollm2.py": ["--help"],  # fetches a model
    "scripts/mutate.py": ["--help"],  # runs the tests
    "scripts/write_architectures.py": ["llama"],
}


def commands(page: Path) -> list[list[str]]:
    """The words behind ``python``, or torchrun's, of every command line in the page's sh blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in line.split("&&")]
    parts = [re.sub("^torchrun ", "python -m torch.distributed.run ", part) for part in parts]
    return [shlex.split(part)[1:] for part in parts if part.startswith("python ")]


def yaml_files(page: Path) -> list[str]:
    """The files that a page shows; a comment in each says which it is."""
    return re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)


def small(words: list[str]) -> list[str]:
    """The command with the least budget."""
    if words[0].startswith("scripts/"):
        return [words[0], *SCRIPTS.get(words[0], words[1:])]
    if any(re.fullmatch(READ_EXPERIMENTS, word) for word in words):
        return [*words, *ONLY_READ]
    budget = next((budget for word, budget in BUDGETS.items() if word in words), TRAIN)
    if budget is TRAIN and any(word.startswith("name=") for word in words):
        budget = [*TRAIN, *(SWEPT if "--multirun" in words else TRAINED)]
        budget += [w for w in ALONE if w not in words] if "+experiment=drope_demo" in words else []
    if any(word.startswith("+phases") for word in words):  # which give the run's length
        budget = [word for word in budget if not word.startswith("trainer.max_steps=")]
    replaced = {word.partition("=")[0] for word in budget if "=" in word}
    rest = [word for word in words if word.partition("=")[0] not in replaced]
    rest = [_shorter(word) if word.startswith("+phases") else word for word in rest]
    place = rest.index("--config-dir") if "--config-dir" in rest else len(rest)
    return [*rest[:place], *budget, *rest[place:]]


def _shorter(phase: str) -> str:
    """The word of a phase with a fifth of its steps."""
    return re.sub(r"(steps|every): (\d+)", lambda m: f"{m[1]}: {int(m[2]) // 5}", phase)


def test_every_page_shows_commands():
    assert all(commands(page) for page in PAGES)


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        file, _, anchor = link.partition("#")
        if not file.startswith("http"):
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_that_a_page_sets_are_keys(page):
    known = set(re.findall(r"^\| `([\w.]+)`", write_keys.PAGE.read_text("utf-8"), re.MULTILINE))
    groups = "|".join(filter(None, write_keys.PARTS.values()))
    set_here = re.findall(rf"(?<![\w./])((?:{groups})\.[\w.]+)=", page.read_text("utf-8"))
    assert [key for key in set_here if key not in known and not key.startswith(FREE_NAMES)] == []


@pytest.mark.slow
def test_the_page_of_keys_is_what_its_script_writes():
    """In a process of its own: tests register encodings and tasks."""
    code = "from scripts import write_keys; print(write_keys.page(), end='')"
    command = [sys.executable, "-c", code]
    page = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert (ROOT / "docs" / "keys.md").read_text("utf-8") == page


def test_the_page_of_evaluation_names_every_method_and_task():
    page = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    methods = [name for name in known_methods() if name.removeprefix("dynamic_") not in RESCALINGS]
    names = [*methods, *RESCALINGS, *TASKS]
    assert [name for name in names if f"`{name}`" not in page and f"={name} " not in page] == []


@pytest.fixture(scope="class")
def place(tmp_path_factory):
    """A directory with the files and the run that commands refer to, and the commands that ran."""
    directory = tmp_path_factory.mktemp("reader")
    lines = (f"Line number {i} of one's own.\n" * 10 for i in range(3000))
    (directory / "my_text.txt").write_text("".join(lines))
    (directory / "scripts").symlink_to(ROOT / "scripts")
    callback = re.search(
        r"```python\n([^`]*class Embeddings.*?)```",
        (ROOT / "docs/lightning.md").read_text(),
        re.DOTALL,
    )
    (directory / "my_callbacks.py").write_text(callback[1])
    for page in "encodings.md", "evaluation.md":
        text = (ROOT / "docs" / page).read_text()
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
            (directory / name).write_text(code)
    for text in yaml_files(ROOT / "docs" / "running.md"):
        path = directory / re.search(r"^# (my_conf/\S+)", text, re.MULTILINE)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done: list[list[str]] = []
    run(commands(ROOT / "README.md")[0], directory, done)
    return directory, done


def run(words: list[str], directory: Path, done: list[list[str]]) -> None:
    """Run a command with the least budget, unless the same was done before."""
    words = small(words)
    if words not in done:
        quiet = {"WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
        quiet |= {} if done else {"FIGURES": "drawn"}
        if words[: len(TORCHRUN)] == TORCHRUN:
            processes = program.run_ranks(2, *words[len(TORCHRUN) :], cwd=directory, **quiet)
        else:
            processes = [program.run(*words, cwd=directory, **quiet)]
        for ended in processes:
            assert ended.returncode == 0, f"{words}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        done.append(words)


SHARED = ("README.md", "encodings.md", "evaluation.md", "geometry.md", "pretrained.md")
SHARING = [page for page in PAGES if page.name in SHARED]
"""Pages that show some of the same commands; those run once."""


@pytest.mark.weekly
class TestPagesThatShareCommands:
    """Two classes, so that two processes share the pages."""

    @pytest.mark.parametrize("page", SHARING, ids=lambda page: page.name)
    def test_commands_run(self, page, place):
        for words in commands(page):
            run(words, *place)


@pytest.mark.weekly
class TestOtherPages:
    @pytest.mark.parametrize(
        "page", [p for p in PAGES if p not in SHARING], ids=lambda page: page.name
    )
    def test_commands_run(self, page, place):
        for words in commands(page):
            run(words, *place)
