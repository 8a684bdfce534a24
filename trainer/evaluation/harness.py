"""Adapter of a decoder to lm-eval's model interface; importing it needs the ``eval`` extra."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager, get_task_dict

from trainer.common.errors import UserError
from trainer.config import HarnessConfig
from trainer.data.tokenizer import end_tokens
from trainer.evaluation.benchmarks import Score
from trainer.evaluation.likelihood import Encoder, Likelihood, Request, log_likelihoods
from trainer.evaluation.passes import longest_first
from trainer.model.config import Sampling
from trainer.model.generate import TextStream, generate
from trainer.model.language_model import LanguageModel

MAX_NEW_TOKENS = 256
"""Default for tasks without ``max_gen_toks``, as for lm-eval's own models."""


class HarnessModel(LM):  # type: ignore[misc]  # lm-eval has no types, so that LM is Any
    """lm-eval model that answers its three kinds of requests.

    ``batch_tokens``: tokens per forward pass, and in the cache during generation.
    """

    def __init__(self, model: LanguageModel, encoder: Encoder, batch_tokens: int = 4096) -> None:
        super().__init__()
        self.model = model.eval()
        self.encoder = encoder
        self.batch_tokens = batch_tokens
        self._device = model.device

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood (nats), and whether it is greedy."""
        pairs = [request.args for request in requests]
        answers = self._likelihoods(self.encoder.requests(pairs))
        return [(answer.log_likelihood, answer.greedy) for answer in answers]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return each whole text's log-likelihood (nats), in windows of the maximum length."""
        windows = [self.encoder.windows(request.args[0]) for request in requests]
        answers = iter(self._likelihoods(list(chain.from_iterable(windows))))
        return [sum(next(answers).log_likelihood for _ in text) for text in windows]

    def _likelihoods(self, requests: Sequence[Request]) -> list[Likelihood]:
        return log_likelihoods(self.model, requests, self.batch_tokens, "Scoring")

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
        room = self.encoder.max_length - new
        if room < 1:
            raise UserError(
                f"evaluation.max_length: expected more than the {new} tokens that the task "
                f"generates, got {self.encoder.max_length}"
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
                [prompts[i] or [self.encoder.bos_token] for i in batch],
                new,
                sampling=sampling,
                end_tokens=self.model.end_tokens
                or end_tokens(self.encoder.tokenizer, self.encoder.eos),
                on_token=push,
            )
        for text in texts:
            text.finish()
        return [text.text for text in texts]


@cache
def _index_of_tasks(include_path: str | None) -> TaskManager:
    """Return lm-eval's index of tasks, which takes seconds to make."""
    return TaskManager(include_path=include_path)


def check_tasks(config: HarnessConfig) -> None:
    """Load the tasks and their data, which lm-eval then caches."""
    try:
        get_task_dict(config.tasks, _index_of_tasks(config.include_path))
    except Exception as error:  # of a task's package, its data set, or the network
        asked = ", ".join(config.tasks)
        raise UserError(f"evaluation.tasks: lm-eval cannot load {asked}: {error}") from error


def score_tasks(model: LanguageModel, encoder: Encoder, config: HarnessConfig) -> list[Score]:
    """Score every task of a configuration with lm-eval."""
    results = lm_eval.simple_evaluate(
        model=HarnessModel(model, encoder, config.batch_tokens),
        tasks=config.tasks,
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        task_manager=_index_of_tasks(config.include_path),
    )
    return [score for task in results["results"] for score in _scores(results, task)]


def _scores(results: dict[str, Any], task: str) -> Iterator[Score]:
    """Yield the numbers in lm-eval's results for a task or group, named like ``acc,none``."""
    numbers = results["results"][task]
    count = results["n-samples"].get(task, {}).get("effective") or numbers.get("sample_len", 0)
    for key, value in numbers.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = numbers.get(f"{metric}_stderr,{filtered}")
        known = error if isinstance(error, float) else None
        better = results.get("higher_is_better", {}).get(task, {}).get(metric)
        each = tuple(_each(results, task, metric, filtered)) if better else ()
        yield Score(task, metric if filtered == "none" else key, float(value), known, count, each)


def _each(results: dict[str, Any], task: str, metric: str, filtered: str) -> Iterator[float]:
    """Yield the score of every question of a task, or of all tasks of a group."""
    for part in results.get("group_subtasks", {}).get(task, ()):
        yield from _each(results, part, metric, filtered)
    for sample in results["samples"].get(task, ()):
        value = sample.get(metric)
        if sample["filter"] == filtered and isinstance(value, int | float):
            yield float(value)
