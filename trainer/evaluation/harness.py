"""Tasks of lm-eval, which get their answers from our models; importing needs the ``eval`` extra."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lm_eval
import pandas as pd
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from trainer.common.errors import UserError
from trainer.config import HarnessSettings
from trainer.data.tokenizer import end_tokens
from trainer.evaluation.likelihood import Encoder, Likelihood, Request, log_likelihoods
from trainer.evaluation.measurements import Measurement, Value, trial_table
from trainer.evaluation.passes import WHOLE, Part, longest_first, part_of
from trainer.evaluation.store import fingerprint
from trainer.model.config import Sampling
from trainer.model.generate import TextStream, generate
from trainer.model.language_model import LanguageModel

MAX_NEW_TOKENS = 256
"""Default for tasks without ``max_gen_toks``, as for lm-eval's own models."""
METRICS = ("acc", "acc_norm", "exact_match", "em", "f1")
"""Metrics that are reported: means over questions of values from 0 to 1."""
FEWSHOT_SEED = 1234
"""lm-eval's default."""


class HarnessModel(LM):  # type: ignore[misc]  # lm-eval has no types, so that LM is Any
    """lm-eval model that answers its three kinds of requests.

    ``max_length``: most tokens that it reads; longer contexts lose their beginning.
    ``batch_tokens``: tokens per forward pass, and in the cache during generation.
    """

    def __init__(
        self, model: LanguageModel, encoder: Encoder, max_length: int, batch_tokens: int
    ) -> None:
        super().__init__()
        self.model, self.encoder = model.eval(), encoder
        self.max_length, self.batch_tokens = max_length, batch_tokens
        self._device = model.device

    def loglikelihood(self, instances: list[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood (nats), and whether it is greedy."""
        pairs = [instance.args for instance in instances]
        requests = [one.within(self.max_length) for one in self.encoder.requests(pairs)]
        answers = self._likelihoods(requests)
        return [(answer.log_likelihood, answer.greedy) for answer in answers]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return each whole text's log-likelihood (nats), in windows of the maximum length."""
        windows = [self.encoder.windows(request.args[0], self.max_length) for request in requests]
        answers = iter(self._likelihoods(list(chain.from_iterable(windows))))
        return [sum(next(answers).log_likelihood for _ in text) for text in windows]

    def _likelihoods(self, requests: Sequence[Request]) -> list[Likelihood]:
        return log_likelihoods(self.model, requests, self.batch_tokens)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return a continuation of each context, up to the first of its stop strings."""
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(index)
        for settings, indices in alike.items():
            contexts = [requests[i].args[0] for i in indices]
            answers = self._continue(contexts, json.loads(settings))
            for i, text in zip(indices, answers, strict=True):
                texts[i] = text
        return texts

    def _continue(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        until = settings.get("until") or []
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        new = int(settings.get("max_gen_toks", MAX_NEW_TOKENS))
        room = self.max_length - new
        if room < 1:
            raise UserError(
                f"evaluation.lengths: expected more than the {new} tokens that the task "
                f"generates, got {self.max_length}"
            )
        temperature = float(settings.get("temperature") or 0.0)
        sampling = Sampling(
            temperature if settings.get("do_sample", temperature > 0) else 0.0,
            float(settings.get("top_p") or 1.0),
        )
        prompts = [tokens[-room:] for tokens in self.encoder.tokens(contexts)]
        texts = [TextStream(self.encoder.tokenizer, stop) for _ in contexts]
        for batch in longest_first([len(p) + new for p in prompts], self.batch_tokens):

            def push(row: int, token: int, batch: list[int] = batch) -> bool:
                text = texts[batch[row]]
                text.push(token)
                return text.stopped

            generate(
                self.model,
                [prompts[i] or [self.encoder.first_token] for i in batch],
                new,
                sampling=sampling,
                end_tokens=self.model.end_tokens or end_tokens(self.encoder.tokenizer),
                on_token=push,
            )
        for text in texts:
            text.finish()
        return [text.text for text in texts]


@dataclass
class Harness(Measurement):
    """A task or group of lm-eval in one metric; trials are the questions of all its tasks.

    ``tasks``: the tasks of a group by name, or one. ``docs``: numbers of the questions of each. A
    length limits what the model reads. A cell has a single part, and its questions are labelled by
    their task if there are several.
    """

    name: str
    metric: str
    tasks: Mapping[str, Task]
    docs: Mapping[str, Sequence[int]]
    encoder: Encoder

    def __post_init__(self) -> None:
        self.key, self.title = f"{self.name}_{self.metric}", f"{self.name} ({self.metric})"

    def sequences(self, length: int) -> int:
        """Return 1, as if all questions were one sequence: a cell has one part."""
        return 1

    def fingerprint(self, length: int) -> str:
        """Return a hash of the tasks' settings and questions."""
        settings = [task.dump_config() for task in self.tasks.values()]
        questions = [
            [task.eval_docs[i] for i in self.docs[name]] for name, task in self.tasks.items()
        ]
        return fingerprint(lm_eval.__version__, repr(settings), repr(questions))

    def trials(self, length: int) -> pd.DataFrame:
        """Return a trial for each question, labelled by its task if there are several."""
        labels = [name for name, docs in self.docs.items() for _ in docs]
        return trial_table(len(labels), labels=labels if len(self.tasks) > 1 else None)

    def read(
        self,
        model: LanguageModel,
        length: int,
        batch_tokens: int,
        reads: int | None = None,
        part: Part = WHOLE,
    ) -> list[Value]:
        """Return the value of every metric of :data:`METRICS` for each question."""
        docs = [(name, doc) for name, of_task in self.docs.items() for doc in of_task]
        numbers = part_of(range(len(docs)), part)
        trials: dict[str, list[int]] = defaultdict(list)
        for number in numbers:
            trials[docs[number][0]].append(number)
        if not trials:
            return []
        results = evaluate(
            HarnessModel(model, self.encoder, min(length, reads or length), batch_tokens),
            {name: self.tasks[name] for name in trials},
            samples={name: [docs[i][1] for i in of_task] for name, of_task in trials.items()},
            bootstrap_iters=0,
        )
        values: list[Value] = []
        for name, of_task in trials.items():
            number_of = {docs[i][1]: i for i in of_task}
            for row in results["samples"][name]:
                for metric in METRICS:
                    if metric in row:
                        label = metric if row["filter"] == "none" else f"{metric}_{row['filter']}"
                        values.append((number_of[row["doc_id"]], label, float(row[metric])))
        return values


def harness_tasks(settings: HarnessSettings, encoder: Encoder) -> list[Harness]:
    """Load the tasks of lm-eval and their data; return each in each of its metrics.

    Raises:
        UserError: a task has no metric of :data:`METRICS`.
    """
    made: list[Harness] = []
    index = TaskManager(include_path=settings.include_path)
    for name in settings.tasks:
        tasks: dict[str, Task] = index.load([name])["tasks"]
        for task in tasks.values():
            shots = task.get_config("num_fewshot")
            if settings.num_fewshot is not None and shots != 0:
                shots = settings.num_fewshot
            task.set_config(key="num_fewshot", value=shots or 0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        docs = {key: range(len(task.eval_docs))[: settings.limit] for key, task in tasks.items()}
        first = next(iter(tasks.values()))
        means = {key for key, combine in first.aggregation().items() if combine is mean}
        filters = [each.name for each in getattr(first, "_filters", ())] or ["none"]
        metrics = [
            metric if each == "none" else f"{metric}_{each}"
            for metric in METRICS
            for each in filters
            if metric in means
        ]
        if not metrics:
            raise UserError(f"evaluation.harness.tasks: {name} has no metric of {METRICS}")
        made += [Harness(name, metric, tasks, docs, encoder) for metric in metrics]
    return made
