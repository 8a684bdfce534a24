"""``python -m trainer generate checkpoint=PATH prompt=TEXT ...``: what does a checkpoint write?"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainer.commands.configuration import Values, compose_values
from trainer.errors import UserError
from trainer.runs.parsing import validated

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trainer.model.decoder import Decoder


@dataclass(frozen=True)
class GenerationRequest:
    """What the ``generate`` command is asked for.

    ``checkpoint``: a run directory or a checkpoint. ``temperature``, ``top_p``, ``seed``: see
    :class:`trainer.generation.sampling.Sampling`. ``stop``: strings that end a continuation and
    are not shown. ``stream``: whether a single continuation is shown while it grows.
    """

    checkpoint: str | None = None
    prompts: list[str] = field(default_factory=list)
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int = 0
    threads: int | None = None
    stream: bool = True

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        from trainer.generation.sampling import Sampling

        found = Sampling(self.temperature, self.top_p, self.seed).problems()
        if not self.checkpoint:
            found.append("checkpoint: give checkpoint=runs/NAME, or a checkpoint in it.")
        if not self.prompts:
            found.append("prompt: give prompt='Once upon a time', once or several times.")
        found += [
            f"{key}: expected a positive number, got {value}."
            for key in ("max_new_tokens", "threads")
            if (value := getattr(self, key)) is not None and value < 1
        ]
        if "" in self.stop:
            found.append("stop: an empty string would stop before the first token.")
        return found


def read_request(words: list[str]) -> GenerationRequest:
    """The request that the words of the command line make.

    Raises:
        UserError: with every problem that can be seen before the checkpoint is read.
    """
    prompts = [word.removeprefix("prompt=") for word in words if word.startswith("prompt=")]
    others = [word for word in words if not word.startswith("prompt=")]
    values: Values
    values, problems = compose_values(others, "generate")
    request, wrong = validated(GenerationRequest, values)
    stop = [text.replace("\\n", "\n") for text in request.stop]
    request = replace(request, prompts=[*request.prompts, *prompts], stop=stop)
    if problems := [*problems, *wrong, *request.problems()]:
        raise UserError(*problems)
    return request


def run(words: list[str]) -> None:
    """Write the continuations to standard output, and how fast it went to standard error."""
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return
    request = read_request(words)
    import torch

    from trainer.runs.fitted_temperature import with_fitted_temperature
    from trainer.runs.models import find_candidate

    torch.set_num_threads(request.threads or os.cpu_count() or 1)
    found = find_candidate(str(request.checkpoint))
    model = found.load()
    model.layout, said = with_fitted_temperature(model.layout, found.path)
    print(f"{found.name}, {found.path.name}{said}", file=sys.stderr)
    try:
        write(model, found.tokenizer, found.begin, request)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)


def write(
    model: Decoder, tokenizer: Tokenizer, begin: int | None, request: GenerationRequest
) -> None:
    """Generate and print: one continuation as it grows, several with their prompts at the end.

    Every prompt begins with ``begin``, where there is one.
    """
    from trainer.data.tokenizer import end_of_text
    from trainer.generation.generate import generate
    from trainer.generation.sampling import Sampling
    from trainer.generation.text_stream import TextStream

    end = end_of_text(tokenizer)
    first = [] if begin is None else [begin]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in request.prompts]
    ids = [[*first, *tokens] for tokens in encoded]
    texts = [TextStream(tokenizer, request.stop) for _ in ids]
    stream = request.stream and len(ids) == 1
    times: list[float] = [time.perf_counter()]

    def on_token(row: int, token: int) -> bool:
        new = texts[row].push(token)
        if stream:
            print(new, end="", flush=True)
        times.append(time.perf_counter())
        return texts[row].stopped

    new = generate(
        model,
        ids,
        request.max_new_tokens,
        sampling=Sampling(request.temperature, request.top_p, request.seed),
        end_tokens={end},
        on_token=on_token,
    )
    rests = [text.finish() for text in texts]
    if stream:
        print(rests[0])
    elif len(ids) == 1:
        print(texts[0].text)
    else:
        for prompt, text in zip(request.prompts, texts, strict=True):
            print(f"{prompt}{text.text}\n")
    print(_summary(sum(map(len, ids)), sum(map(len, new)), len(ids), times), file=sys.stderr)


def _summary(read: int, written: int, prompts: int, times: list[float]) -> str:
    """Tokens and tokens a second of reading the prompts and of writing what followed."""
    first = times[prompts]
    said = f"{read} tokens read, {read / (first - times[0]):,.0f} a second; {written} written"
    if written > prompts:
        said += f", {(written - prompts) / (times[-1] - first):,.1f} a second"
    return said


HELP = """\
python -m trainer generate checkpoint=PATH prompt=TEXT [prompt=TEXT ...] [KEY=VALUE ...]

Continues a text with a trained checkpoint or a published model. The text goes to standard output;
which checkpoint it is and tokens a second go to standard error. Where an evaluation has fitted a
softmax temperature for the checkpoint, it is used.

  checkpoint=      a run directory (its newest checkpoint), a checkpoint in it, or a published
                   model's directory or .gguf file
  prompt=          what to continue, taken as it is; given several times, all grow together and
                   are shown at the end, each after its prompt
  max_new_tokens=  at the most; default: 128
  temperature=     0 (default) takes the likeliest token, 1 draws as the model says
  top_p=           draws from the likeliest tokens that have this probability together; default: 1
  stop=            strings that end a continuation, for instance 'stop=["\\n"]'
  seed=            of the draws; default: 0
  threads=         CPU threads; default: all cores
  stream=          false shows a single continuation only when it is whole
"""
