"""``python -m trainer recalibrate MODEL text=FILES minutes=20``: a trained model without RoPE."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.hydra.command import Command
from trainer.commands.train import read as read_train
from trainer.common.errors import Problem, raise_all
from trainer.common.fields import OptionalText, Positive, configuration
from trainer.common.words import override_value

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.workflows.recalibrate import Asked, Recalibration
    from trainer.workflows.recipe import Recipe


@configuration
class RecalibrateKeys:
    """Keys of this command; the others are a run's."""

    minutes: Positive = 20.0
    """Minutes of recalibration and evaluation together; preparing text and exporting add to
    them."""
    text: OptionalText | list[str] = None
    """Text files, directories or globs to recalibrate on, as data.files; null: another data group,
    such as data=stdlib_docs."""
    to: OptionalText = None
    """Directory of the export, new or empty; null: export in the run directory."""


ROOT = "recalibrate"
MODEL_KEYS = ("model.from_pretrained", "model.from_run")


def read(composed: Composed) -> Recalibration:
    """Return the checked recalibration, with everything chosen that the words leave open.

    Raises:
        UserError: with every problem found before the model is measured, or all those after.
    """
    asked, recipe, words = completed(composed)
    from trainer.commands.hydra.composing import compose_words
    from trainer.workflows.recalibrate import Recalibration

    keys, _, run = compose_words(words, ROOT, composed.files).split(RecalibrateKeys)
    evaluation = run.values["evaluation"]
    evaluates = evaluation["enabled"]
    values = {**run.values, "evaluation": {**evaluation, "enabled": False}}
    config = read_train(replace(run, values=values)).request
    if evaluates:
        raise_all(config.evaluation.problems())
    to = Path(keys.to or Path(config.run_dir, "export"))
    # The command line of the run alone: without this command's keys, with its defaults.
    own_keys = [field.name for field in fields(RecalibrateKeys)]
    defaults = ["data=files", "drop=pretrained", "evaluation.enabled=false"]
    alone = [word for word in defaults if word.partition("=")[0] not in composed.named_keys]
    alone += [word for word in words if word.partition("=")[0] not in own_keys]
    return Recalibration(asked, config, recipe, evaluates, to, tuple(alone))


def completed(composed: Composed) -> tuple[Asked, Recipe, list[str]]:
    """Return the request, its recipe, and the words of the run: the chosen ones, then the user's.

    Raises:
        UserError: with every problem of the words, of packages, of the model or of the minutes.
    """
    keys, problems, _ = composed.split(RecalibrateKeys)
    raise_all([*composed.problems, *problems, *_word_problems(composed, keys)])
    from trainer.commands.console import set_up_console
    from trainer.workflows.recalibrate import Asked, asked_problems, recipe_for, source_of

    (model,) = composed.verbatim
    listed = [keys.text] if isinstance(keys.text, str) else keys.text or []
    asked = Asked(model, keys.minutes, tuple(listed))
    raise_all(asked_problems(asked))
    stem = re.sub(r"[^\w.+-]", "-", Path(model).absolute().name.removesuffix(".gguf")).lstrip("-.+")
    words: dict[str, Any] = {"name": f"{stem}-drope", f"model.{source_of(model)}": model}
    if asked.text:
        words["data.files"] = list(asked.text)
    user_keys, values = composed.named_keys, composed.values
    words = {key: value for key, value in words.items() if key not in user_keys}
    run_dir = values["run_dir"]
    if not {"name", "run_dir"} & {*user_keys}:
        run_dir = f"runs/{words['name']}"
    user_values = {key: composed.value(key) for key in user_keys}
    user_values = {key: value for key, value in user_values.items() if value is not None}
    set_up_console()
    to = None if keys.to is None else Path(keys.to)
    overwrite = values["overwrite"] is True
    recipe = recipe_for(asked, Path(run_dir), user_values, overwrite=overwrite, to=to)
    words |= {choice.key: choice.value for choice in recipe.choices if choice.key not in user_keys}
    chosen = [f"{key}={override_value(value)}" for key, value in words.items()]
    return asked, recipe, [*chosen, *composed.words]


def _word_problems(composed: Composed, keys: RecalibrateKeys) -> list[Problem]:
    """Check the words before the model is read."""
    problems = []
    if len(composed.verbatim) != 1:
        models = " and ".join(map(repr, composed.verbatim)) or "none"
        problems.append(
            Problem(
                "MODEL",
                f"expected one directory, .gguf file, run or hub id, got {models}: python -m "
                "trainer recalibrate MODEL text=FILES minutes=20.",
            )
        )
    elif not (path := Path(composed.verbatim[0])).exists() and path.parent.name == "runs":
        from trainer.runs.directory import nothing_at

        problems.append(nothing_at(str(path), "MODEL"))
    problems += [
        Problem(key, "MODEL names the weights; leave it out.")
        for key in MODEL_KEYS
        if key in composed.named_keys
    ]
    needs_text = composed.choices.get("data") == "files" and not composed.value("data.files")
    if keys.text and not needs_text:
        problems.append(Problem("text", "the text is given by data already; leave one out."))
    if needs_text and not keys.text and "text" not in [p.key for p in composed.problems]:
        problems.append(
            Problem(
                "text",
                "give the text to recalibrate on, text=FILE or 'text=[texts/*.jsonl]'; "
                "data=stdlib_docs takes the text that comes with Python.",
            )
        )
    return problems


def words_of(composed: Composed) -> list[str]:
    """Return all words of the run, for ``--cfg job``."""
    return completed(composed)[2]


def execute(request: Recalibration) -> None:
    """Show the plan, then recalibrate, evaluate and export."""
    from trainer.commands.console import print_report
    from trainer.commands.plan import print_sections
    from trainer.workflows import recalibrate
    from trainer.workflows.plan import PlanRequest, plan

    print_sections([recalibrate.section(request)])
    print(f"The run alone: python -m trainer {shlex.join(request.words)}\n")
    corpus = recalibrate.prepare(request)
    print_sections(islice(plan(PlanRequest(request.config, 1, 1, "h100", 0.4)), 2))
    if (outcome := recalibrate.train(request)) is not None:
        print_report(outcome[0], request.config.run_dir, outcome[1])
    if request.evaluates and (measured := recalibrate.evaluate(request, corpus)) is not None:
        print_report(measured[0], str(measured[1]), existing=False)
    recalibrate.export(request)
    print(f"For transformers: {request.to}. Try next:")
    words = ["python", "-m", "trainer", "generate", str(request.to), "prompt=Once upon a time"]
    print(f"  {shlex.join(words)}")


HELP = """
python -m trainer recalibrate MODEL text=FILES [minutes=20] [name=NAME] [KEY=VALUE ...]

Drops the positional encoding of a trained model and recalibrates it on the text, in the minutes
given. MODEL is a directory or hub id of published weights, a .gguf file, or a run of this program.
Length, batch, steps, learning rate, warm-up and QK-norm follow from the model, the measured speed
and the time (docs/pretrained.md); a word for any key of a run overrides one. The plan is shown
first. Then the model is trained, measured beside what it was (loss and a needle task; with a fitted
temperature, and the other with YaRN and dynamic NTK), and exported for transformers. Interrupted,
the same command resumes.
"""
COMMAND = Command(
    ROOT,
    HELP,
    read,
    execute,
    single="run it for each model.",
    bare=True,
    completed=words_of,
    alone=True,
)
