#!/usr/bin/env python
"""Measure the speed of needle evaluations, ours and with transformers' generate.

    python scripts/benchmark_needles.py --model nano --trials 24
    python scripts/benchmark_needles.py --model smollm2 --trials 1 --depths 0 0.25 0.5 0.75 1
    python scripts/benchmark_needles.py --checkpoint runs/drope_demo

Both use the same weights, prompts, batches, threads and rule for when an answer is long enough, and
should give the same answers. They take turns; a ratio is the median over the rounds, with its
quartiles. Prompts have four times the training length of ``nano`` (random weights in its shape) or
of the checkpoint, and 2,048 tokens for ``smollm2`` (fetched by scripts/fetch_smollm2.py). The task
``statements`` is the one of the demo; its answers are one token.
"""

from __future__ import annotations

from trainer import __version__  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from trainer.commands import compose_words, run_config
from trainer.common.errors import UserError
from trainer.config import NeedleTaskSettings
from trainer.data.needles import WORDS, NeedleVocabulary, make_trials
from trainer.data.sources import stdlib_docs
from trainer.data.tokenizer import special_tokens, train_tokenizer
from trainer.evaluation.answering import answers
from trainer.evaluation.held_out import Statements
from trainer.evaluation.needles import NEEDLE_TASKS, Haystack
from trainer.evaluation.scoring import Prompt, Stop
from trainer.evaluation.task import PromptTask
from trainer.interchange.export import export_model
from trainer.interchange.pretrained import read_pretrained
from trainer.model.decoder import Decoder
from trainer.runs.models import read_run

STATEMENTS = "statements"


@dataclass(frozen=True)
class Pair:
    """A model in both implementations, with its tokenizer and the prompt length to measure."""

    name: str
    ours: Decoder
    theirs: transformers.PreTrainedModel
    tokenizer: Tokenizer
    length: int


def exported(name: str, model: Decoder, tokenizer: Tokenizer) -> Pair:
    """Pair a decoder with the model that transformers loads from its export."""
    with tempfile.TemporaryDirectory(prefix="unrope-benchmark-") as directory:
        to = Path(directory) / "model"
        export_model(model, tokenizer, special_tokens(tokenizer).end, to)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            to, dtype=torch.float32, trust_remote_code=True
        )
    return Pair(name, model, theirs, tokenizer, 4 * model.layout.training_length)


def nano() -> Pair:
    """Make a decoder of the shape ``model=nano`` with random weights."""
    tokenizer = train_tokenizer(stdlib_docs(), 1024, WORDS)
    shape = run_config(compose_words(["model=nano"])).model
    config = replace(shape, vocab_size=tokenizer.get_vocab_size(), attention_backend="sdpa")
    return exported("nano", random_decoder(config, 64), tokenizer)


def smollm2() -> Pair:
    """Load SmolLM2-135M-Instruct in both implementations from the same files."""
    sys.path.insert(0, str(Path(__file__).parent))
    from fetch_smollm2 import fetch, model_directory

    directory = model_directory()
    if not directory.is_dir():
        fetch(directory)
    pretrained = read_pretrained(str(directory))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert pretrained.tokenizer is not None
    return Pair("SmolLM2-135M", pretrained.decoder(), theirs, pretrained.tokenizer, 2048)


def checkpoint(place: str) -> Pair:
    """Load a run directory or checkpoint of this project."""
    path = find_checkpoint(place)
    state = read_state(path)
    return exported(place, read_run(path).decoder(), Tokenizer.from_str(state["tokenizer"]))


class Settled(transformers.StoppingCriteria):
    """Stopping criteria that apply our rule for long enough answers to each row."""

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[Prompt], stop: Stop) -> None:
        self.tokenizer, self.prompts, self.stop = tokenizer, prompts, stop

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Return ``[B]`` booleans: whether each answer is complete."""
        generated = self.tokenizer.decode_batch(ids[:, len(self.prompts[0].tokens) :].tolist())
        pairs = zip(generated, self.prompts, strict=True)
        return torch.tensor([self.stop(text, prompt.answers) for text, prompt in pairs])


def by_transformers(
    pair: Pair, prompts: Sequence[Prompt], batch_tokens: int, stop: Stop | None
) -> list[str]:
    """Answer prompts of one length with transformers, in batches as large as ours."""
    end, texts = special_tokens(pair.tokenizer).end, []
    size = max(1, batch_tokens // (len(prompts[0].tokens) + prompts[0].new_tokens))
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        ids = torch.tensor([prompt.tokens for prompt in batch])
        more = {} if stop is None else {"stopping_criteria": [Settled(pair.tokenizer, batch, stop)]}
        out = pair.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=batch[0].new_tokens,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
            **more,
        )
        texts += pair.tokenizer.decode_batch(out[:, ids.shape[1] :].tolist())
    return texts


Answers = Callable[[], list[Any]]
"""Answers all prompts: their text, or for statements whether it is right."""


def of_statements(
    pair: Pair, haystack: Haystack, settings: NeedleTaskSettings, length: int, batch_tokens: int
) -> tuple[Answers, Answers]:
    """Return how both answer the trials of the demo's task, ours as an evaluation does."""
    vocabulary = NeedleVocabulary.from_tokenizer(haystack.tokenizer)
    random = np.random.default_rng(settings.seed)
    count = settings.trials * len(settings.depths)
    begins = [haystack.begin(length, random) for _ in range(count)]
    text = np.array([haystack.tokens[begin : begin + length] for begin in begins])
    text[:, 0] = haystack.bos[0]
    trials = make_trials(text, np.arange(count), vocabulary, settings.needles, settings.seed)
    task = Statements({length: trials}, haystack.bos[0])
    numbers = haystack.tokenizer.decode_batch(trials.answers[:, None].tolist())
    prompts = [Prompt(tokens, (), 1) for tokens in trials.prompts.tolist()]

    def ours() -> list[bool]:
        batches = task.batches(pair.ours, length, batch_tokens)
        return [value == 1 for read in batches for _, _, value in read()]

    def theirs() -> list[bool]:
        texts = by_transformers(pair, prompts, batch_tokens, None)
        return [text == number for text, number in zip(texts, numbers, strict=True)]

    return ours, theirs


def of_prompts(
    pair: Pair, task: PromptTask, length: int, batch_tokens: int
) -> tuple[Answers, Answers]:
    """Return how both answer the prompts of a task."""
    prompts = [replace(p, tokens=array("i", p.tokens)) for p in task.prompts(length)]

    def ours() -> list[str]:
        return answers(pair.ours, pair.tokenizer, prompts, batch_tokens, task.stop)

    return ours, lambda: by_transformers(pair, prompts, batch_tokens, task.stop)


def compare(pair: Pair, task_name: str, options: argparse.Namespace) -> list[str]:
    """Measure both in turns and return a row of the table."""
    haystack = Haystack(pair.tokenizer, stdlib_docs(), (special_tokens(pair.tokenizer).end,))
    settings = NeedleTaskSettings(trials=options.trials, depths=tuple(options.depths))
    length = options.length or pair.length
    if task_name == STATEMENTS:
        both = of_statements(pair, haystack, settings, length, options.batch_tokens)
    else:
        if task_name.startswith("multi"):  # as many prompts as the other tasks have
            settings = replace(settings, trials=options.trials * len(settings.depths))
        task = NEEDLE_TASKS[task_name](haystack, settings)
        both = of_prompts(pair, task, length, options.batch_tokens)
    contestants = dict(zip(("ours", "transformers"), both, strict=True))
    outputs = {name: answered() for name, answered in contestants.items()}  # warm up
    times: dict[str, list[float]] = {name: [] for name in contestants}

    def turn(name: str) -> None:
        start = time.perf_counter()
        outputs[name] = contestants[name]()
        times[name].append(time.perf_counter() - start)

    print(f"{pair.name}, {task_name}", file=sys.stderr)
    take_turns(list(contestants), options.rounds, turn)
    same, count = sum(map(eq, *outputs.values())), len(outputs["ours"])
    return [
        f"{pair.name}, {task_name}, {length} tokens",
        *(f"{count / median(seconds):,.2f}" for seconds in times.values()),
        ratio(times["transformers"], times["ours"]),
        f"{same}/{count}",
    ]


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
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    if options.checkpoint:
        pair = checkpoint(options.checkpoint)
    else:
        pair = {"nano": nano, "smollm2": smollm2}[options.model]()
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    pair = replace(pair, ours=pair.ours.to(dtype).eval(), theirs=pair.theirs.to(dtype).eval())
    default = ["standard"] if options.model == "smollm2" else [STATEMENTS, "standard"]
    table = table_of(
        f"{options.precision}, {options.threads} threads, {options.rounds} rounds",
        *("", "ours trials/s", "transformers", "ratio (quartiles)", "same"),
    )
    for task in options.task or default:
        table.add_row(*compare(pair, task, options))
    Console(width=100).print(table)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
