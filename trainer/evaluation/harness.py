"""Tasks of lm-eval, which get their answers from our models; importing needs the ``eval`` extra."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import lm_eval
import pandas as pd
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.model import LM
from lm_eval.api.task import Task as HarnessTask
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from trainer.common.errors import UserError, nearest
from trainer.config import HarnessSettings
from trainer.evaluation.answering import answers
from trainer.evaluation.likelihood import Encoder, log_likelihoods
from trainer.evaluation.scoring import Prompt, check_room
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import Task, Value
from trainer.model.generate import text_until
from trainer.model.language_model import LanguageModel

METRICS = ("acc", "acc_norm", "exact_match", "em", "f1")
"""Metrics that are reported: means over questions of values from 0 to 1."""
FEWSHOT_SEED = 1234
"""lm-eval's default."""


class HarnessModel(LM):  # type: ignore[misc]  # lm-eval has no types, so that LM is Any
    """lm-eval model that answers requests for likelihoods and, greedily, for text; contexts longer
    than ``max_length`` lose their beginning."""

    def __init__(
        self, model: LanguageModel, encoder: Encoder, max_length: int, batch_tokens: int
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.encoder = encoder
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        self._device = model.device

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood (nats), and whether it is greedy."""
        encoded = self.encoder.requests([request.args for request in requests])
        return log_likelihoods(self.model, encoded, self.batch_tokens, self.max_length)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Raise: no metric of :data:`METRICS` needs the likelihood of a whole text."""
        raise UserError("evaluation.harness.tasks: likelihoods of whole texts are not supported")

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the greedy continuation of each context, up to the first of its stop strings."""
        prompts = []
        for context, options in (request.args for request in requests):
            settings = normalize_gen_kwargs(options)
            new_tokens = settings["max_gen_toks"]
            room = self.max_length - new_tokens
            check_room(room - 1, f"{new_tokens} that are generated", self.max_length)
            (tokens,) = self.encoder.tokens([context])
            read = tokens[-room:] or (self.encoder.first_token,)
            prompts.append(Prompt(read, tuple(filter(None, settings["until"])), new_tokens))

        texts = answers(
            self.model,
            self.encoder.tokenizer,
            prompts,
            self.batch_tokens,
            stop=lambda text, stops: text_until(text, stops) != text,
        )
        return [text_until(text, p.answers) for text, p in zip(texts, prompts, strict=True)]


def metrics_of(task: HarnessTask) -> dict[tuple[str, str], str]:
    """Return the names of a task's metrics that are in :data:`METRICS`, by metric and the filter of
    lm-eval that answers went through."""
    means = [metric for metric in METRICS if task.aggregation().get(metric) is mean]
    filters = [each.name for each in getattr(task, "_filters", ())] or ["none"]
    names = {}
    for metric, of_answers in product(means, filters):
        names[metric, of_answers] = metric if of_answers == "none" else f"{metric}_{of_answers}"
    return names


def harness_tasks(
    settings: HarnessSettings, encoder: Encoder, lengths: Sequence[int], limit: int
) -> list[Task]:
    """Load the tasks and groups of lm-eval and their data, the first ``limit`` questions of each,
    and return each at every length.

    Raises:
        UserError: there is no such task; a task, or all tasks of a group, have no metric of
            :data:`METRICS` in common; or a task draws its answers at random.
    """
    of_lengths: list[Task] = []
    index = TaskManager()
    for name in settings.tasks:
        if name not in index.all_tasks and not Path(name).is_file():
            text = f"evaluation.harness.tasks: lm-eval has no task {name!r}"
            raise UserError(text + nearest(name, index.all_tasks))
        tasks: dict[str, HarnessTask] = index.load([name])["tasks"]
        for task in tasks.values():
            task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
            if normalize_gen_kwargs(task.get_config("generation_kwargs") or {})["do_sample"]:
                raise UserError(f"evaluation.harness.tasks: {name} samples; answers are greedy")
        questions = {key: list(task.eval_docs)[:limit] for key, task in tasks.items()}
        contents = [_contents(task, questions[key]) for key, task in tasks.items()]
        key = fingerprint(lm_eval.__version__, encoder.bos, encoder.first_token, contents)
        for length in lengths:
            of_lengths.append(harness_task(name, tasks, questions, encoder, length, key))
    return of_lengths


def _contents(task: HarnessTask, questions: Sequence[object]) -> list[object]:
    """Return all that a task's values depend on, but for the model and lm-eval's own code: requests
    with few-shot examples, and the configuration with functions and metrics."""
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    task.build_all_requests(samples=[*range(len(questions))])
    requests = [repr((request.request_type, request.args)) for request in task.instances]
    configuration = asdict(task.config)
    metadata = dict(configuration["metadata"] or {})
    metadata.pop("config_source", None)  # where the YAML file lies on this machine
    return [repr(questions), requests, configuration | {"metadata": metadata}, type(task)]


def harness_task(
    name: str,
    tasks: dict[str, HarnessTask],
    questions: Mapping[str, Sequence[object]],
    encoder: Encoder,
    length: int,
    key: str,
) -> Task:
    """Return a task or group of lm-eval at a length, which limits what the model reads.

    Trials are the questions of all its tasks, labelled by their task if there are several.
    ``tasks``, ``questions``: by the names of its tasks. ``key``: its fingerprint.
    """
    of_tasks = [metrics_of(task) for task in tasks.values()]
    common = set.intersection(*map(set, of_tasks))
    metrics = {source: metric for source, metric in of_tasks[0].items() if source in common}
    if not metrics:
        raise UserError(f"evaluation.harness.tasks: {name} has no metric of {METRICS}")
    titles = {f"{name}_{metric}": f"{name} ({metric})" for metric in metrics.values()}
    labels: list[str] = []
    for subtask, of_task in questions.items():
        label = subtask if len(tasks) > 1 else ""
        labels += [label] * len(of_task)

    def read(model: LanguageModel, batch_tokens: int) -> list[Value]:
        """Return the value of every reported metric for each question."""
        longest = min(length, model.context or length)
        for task in tasks.values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)  # the same examples for every model
        results = evaluate(
            HarnessModel(model, encoder, longest, batch_tokens),
            dict(tasks),
            samples={subtask: [*range(len(rows))] for subtask, rows in questions.items()},
            bootstrap_iters=0,
        )
        values: list[Value] = []
        begin = 0  # number of the task's first trial
        for subtask, of_task in questions.items():
            for row in results["samples"][subtask]:
                number = begin + row["doc_id"]
                for (source, of_answers), metric in metrics.items():
                    if source in row and of_answers == row["filter"]:
                        values.append((number, f"{name}_{metric}", float(row[source])))
            begin += len(of_task)
        return values

    trials = pd.DataFrame({"label": labels})
    return Task(titles, length, key, trials, lambda model, size: [partial(read, model, size)])
