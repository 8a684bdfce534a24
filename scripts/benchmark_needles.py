#!/usr/bin/env python
"""Measure the speed of needle evaluations, ours and with transformers' generate.

    python scripts/benchmark_needles.py --model nano --trials 24
    python scripts/benchmark_needles.py --model smollm2 --trials 1 --depths 0 0.25 0.5 0.75 1
    python scripts/benchmark_needles.py --checkpoint runs/drope_demo

Both use the same weights, prompts, batches, threads and rule for when an answer is long enough, and
should give the same answers. Each has a process of its own, because this program sets how memory is
used again; ``--same-memory`` sets it for transformers, too. They take turns; a ratio is the median
over the rounds, with its quartiles. Prompts have four times the training length of ``nano`` (random
weights in its shape) or of the checkpoint, and 2,048 for ``smollm2`` (fetched by
scripts/fetch_smollm2.py). The task ``statements`` is that of the demo; its answers are one token.
"""

from __future__ import annotations

from trainer.common import spinning  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks import random_decoder, ratio, table_of, take_turns
from rich.console import Console
from tokenizers import Tokenizer

from trainer.checkpoint import find_checkpoint, read_state
from trainer.commands import compose_words, run_of
from trainer.common.errors import UserError
from trainer.common.processes import use_cores
from trainer.config import NeedleTaskSettings
from trainer.data.needles import WORDS, NeedleVocabulary, make_trials
from trainer.data.sources import stdlib_docs
from trainer.data.tokenizer import special_tokens, train_tokenizer
from trainer.evaluation.answering import answers
from trainer.evaluation.held_out import Haystack
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.scoring import Prompt, Stop
from trainer.evaluation.statements import statement_batches
from trainer.evaluation.task import PromptTask
from trainer.interchange.export import Tokens, export_model
from trainer.interchange.pretrained import read_pretrained
from trainer.model.decoder import Decoder
from trainer.runs.models import read_run

STATEMENTS = "statements"


@dataclass(frozen=True)
class Pair:
    """A decoder, the directory from which transformers loads the same model, their tokenizer and
    the prompt length to measure."""

    name: str
    ours: Decoder
    directory: str
    tokenizer: Tokenizer
    length: int

    @property
    def theirs(self) -> tuple[str, torch.dtype, Tokenizer]:
        """What transformers gets."""
        return self.directory, self.ours.embed_tokens.weight.dtype, self.tokenizer


def exported(name: str, model: Decoder, tokenizer: Tokenizer, directory: str) -> Pair:
    """Pair a decoder with its export to ``directory``."""
    to = Path(directory) / "model"
    export_model(model, Tokens(tokenizer, special_tokens(tokenizer).end), to)
    return Pair(name, model, str(to), tokenizer, 4 * model.layout.training_length)


def nano(directory: str) -> Pair:
    """Make a decoder of the shape ``model=nano`` with random weights."""
    tokenizer = train_tokenizer(stdlib_docs(), 1024, WORDS)
    shape = run_of(compose_words(["model=nano"])).config.model
    config = replace(shape, vocab_size=tokenizer.get_vocab_size(), attention_backend="sdpa")
    return exported("nano", random_decoder(config, 64), tokenizer, directory)


def smollm2() -> Pair:
    """Load SmolLM2-135M-Instruct; both implementations read the same files."""
    sys.path.insert(0, str(Path(__file__).parent))
    from fetch_smollm2 import fetch, model_directory

    directory = model_directory()
    if not directory.is_dir():
        fetch(directory)
    pretrained = read_pretrained(str(directory))
    assert pretrained.tokenizer is not None
    return Pair("SmolLM2-135M", pretrained.decoder(), str(directory), pretrained.tokenizer, 2048)


def checkpoint(place: str, directory: str) -> Pair:
    """Load a run directory or checkpoint of this project."""
    path = find_checkpoint(place)
    tokenizer = Tokenizer.from_str(read_state(path)["tokenizer"])
    return exported(place, read_run(path).decoder(), tokenizer, directory)


class Settled(transformers.StoppingCriteria):
    """Stopping criteria that apply our rule for long enough answers to each row."""

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[Prompt], stop: Stop) -> None:
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.stop = stop

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Return ``[B]`` booleans: whether each answer is complete."""
        generated = self.tokenizer.decode_batch(ids[:, len(self.prompts[0].tokens) :].tolist())
        pairs = zip(generated, self.prompts, strict=True)
        return torch.tensor([self.stop(text, prompt.answers) for text, prompt in pairs])


Timed = tuple[list[Any], float]
"""Answers to all prompts, their text or for statements whether it is right, and the seconds."""


@cache
def loaded(directory: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Load a model in transformers."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(directory, dtype=dtype, trust_remote_code=True).eval()


def by_transformers(
    directory: str,
    dtype: torch.dtype,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    batch_tokens: int,
    stop: Stop | None,
) -> Timed:
    """Answer prompts of one length with transformers, in batches as large as ours."""
    model = loaded(directory, dtype)
    end = special_tokens(tokenizer).end
    texts: list[str] = []
    began = time.perf_counter()
    size = max(1, batch_tokens // (len(prompts[0].tokens) + prompts[0].new_tokens))
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        ids = torch.tensor([prompt.tokens for prompt in batch])
        more = {} if stop is None else {"stopping_criteria": [Settled(tokenizer, batch, stop)]}
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=batch[0].new_tokens,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
            **more,
        )
        texts += tokenizer.decode_batch(out[:, ids.shape[1] :].tolist())
    return texts, time.perf_counter() - began


Answers = tuple[Callable[[], Timed], Callable[[], Timed]]
"""How each of the two answers all prompts."""


def of_statements(
    pair: Pair,
    haystack: Haystack,
    settings: NeedleTaskSettings,
    length: int,
    batch_tokens: int,
    other: Executor,
) -> Answers:
    """Return how both answer the trials of the demo's task, ours as an evaluation does."""
    vocabulary = NeedleVocabulary.from_tokenizer(haystack.encoder.tokenizer)
    random = np.random.default_rng(settings.seed)
    count = settings.trials * len(settings.depths)
    begins = [haystack.begin(length, random) for _ in range(count)]
    text = np.array([haystack.tokens[begin : begin + length] for begin in begins])
    text[:, 0] = haystack.encoder.first_token
    trials = make_trials(text, vocabulary, settings)
    numbers = haystack.encoder.tokenizer.decode_batch(trials.answers[:, None].tolist())
    prompts = [Prompt(tokens, (), 1) for tokens in trials.prompts.tolist()]

    def ours() -> Timed:
        began = time.perf_counter()
        first_token = haystack.encoder.first_token
        batches = statement_batches(trials, first_token, pair.ours, batch_tokens)
        hits = [value == 1 for read in batches for _, _, value in read()]
        return hits, time.perf_counter() - began

    def theirs() -> Timed:
        answered = other.submit(by_transformers, *pair.theirs, prompts, batch_tokens, None)
        texts, seconds = answered.result()
        return [text == number for text, number in zip(texts, numbers, strict=True)], seconds

    return ours, theirs


def of_prompts(
    pair: Pair, task: PromptTask, length: int, batch_tokens: int, other: Executor
) -> Answers:
    """Return how both answer the prompts of a task."""
    prompts = [replace(p, tokens=array("i", p.tokens)) for p in task.prompts(length)]

    def ours() -> Timed:
        began = time.perf_counter()
        texts = answers(pair.ours, pair.tokenizer, prompts, batch_tokens, task.stop)
        return texts, time.perf_counter() - began

    def theirs() -> Timed:
        answered = other.submit(by_transformers, *pair.theirs, prompts, batch_tokens, task.stop)
        return answered.result()

    return ours, theirs


def compare(pair: Pair, task_name: str, options: argparse.Namespace, other: Executor) -> list[str]:
    """Measure both in turns and return a row of the table."""
    end = special_tokens(pair.tokenizer).end
    haystack = Haystack(Encoder(pair.tokenizer, (end,), end), stdlib_docs())
    settings = NeedleTaskSettings(trials=options.trials, depths=tuple(options.depths))
    length = options.length or pair.length
    if task_name == STATEMENTS:
        both = of_statements(pair, haystack, settings, length, options.batch_tokens, other)
    else:
        if task_name.startswith("multi"):  # as many prompts as the other tasks have
            settings = replace(settings, trials=options.trials * len(settings.depths))
        task = NEEDLE_TASKS[task_name](haystack, settings)
        both = of_prompts(pair, task, length, options.batch_tokens, other)
    contestants = dict(zip(("ours", "transformers"), both, strict=True))
    outputs = {name: answered()[0] for name, answered in contestants.items()}  # warm up
    times: dict[str, list[float]] = {name: [] for name in contestants}

    def turn(name: str) -> None:
        outputs[name], seconds = contestants[name]()
        times[name].append(seconds)

    print(f"{pair.name}, {task_name}", file=sys.stderr)
    take_turns(list(contestants), options.rounds, turn)
    same = sum(map(eq, *outputs.values()))
    count = len(outputs["ours"])
    return [
        f"{pair.name}, {task_name}, {length} tokens",
        *(f"{count / median(seconds):,.2f}" for seconds in times.values()),
        ratio(times["transformers"], times["ours"]),
        f"{same}/{count}",
    ]


def begin(threads: int, same_memory: bool) -> None:
    """Prepare the process of transformers."""
    transformers.logging.set_verbosity_error()
    if same_memory:
        use_cores(threads)
    else:
        torch.set_num_threads(threads)


def main() -> None:
    """Run the comparisons and print their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("nano", "smollm2"), default="nano")
    parser.add_argument("--checkpoint", help="a run directory or checkpoint, instead of --model")
    parser.add_argument("--task", nargs="+", choices=(STATEMENTS, *NEEDLE_TASKS))
    parser.add_argument("--trials", type=int, default=24, help="haystacks")
    parser.add_argument("--depths", type=float, nargs="+", default=NeedleTaskSettings.depths)
    parser.add_argument("--length", type=int, help="tokens of prompt and answer")
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--same-memory", action="store_true", help="also for transformers")
    options = parser.parse_args()
    use_cores(options.threads)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    default = ["standard"] if options.model == "smollm2" else [STATEMENTS, "standard"]
    table = table_of(
        f"{options.precision}, {options.threads} threads, {options.rounds} rounds",
        *("", "ours trials/s", "transformers", "ratio (quartiles)", "same"),
    )
    settings = options.threads, options.same_memory
    with (
        tempfile.TemporaryDirectory(prefix="unrope-benchmark-") as directory,
        ProcessPoolExecutor(1, get_context("spawn"), begin, settings) as other,
    ):
        if options.checkpoint:
            pair = checkpoint(options.checkpoint, directory)
        elif options.model == "nano":
            pair = nano(directory)
        else:
            pair = smollm2()
        pair.ours.to(dtype).eval()
        for task in options.task or default:
            table.add_row(*compare(pair, task, options, other))
    Console(width=100).print(table)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
