"""The task of needles in the words of training sequences: one token answers."""

from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from trainer.data.corpus import held_out_windows
from trainer.data.needles import NeedleVocabulary, Trials, make_trials
from trainer.evaluation.results import STATEMENTS
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import Batch, Task, TaskInputs, Value, task
from trainer.model.language_model import LanguageModel


@task(STATEMENTS, settings="needles")
def statements(inputs: TaskInputs) -> list[Task]:
    """Return the task at each length: multi-key needles in the words of the demo's training
    sequences (:mod:`trainer.data.needles`), or no task and a note if these had none."""
    if not inputs.text.training_share:
        inputs.notes.append(
            "The task 'statements' was left out: the training text of the first model "
            "carried none, or is not known (data.needles.share)."
        )
        return []
    first_token = inputs.text.corpus.first_token
    vocabulary = NeedleVocabulary.from_tokenizer(inputs.text.corpus.tokenizer)
    longest = held_out_windows(inputs.text.split, inputs.trials, max(inputs.lengths))
    tasks = []
    for length in inputs.lengths:
        windows = longest[:, -length:].copy()
        windows[:, 0] = first_token
        trials = make_trials(windows, vocabulary, inputs.settings)
        of_length = Task(
            {STATEMENTS: "Stated numbers found"},
            length,
            fingerprint(trials, first_token),
            pd.DataFrame({"depth": np.round(1 - trials.depths / length, 4)}),
            partial(statement_batches, trials, first_token),
        )
        tasks.append(of_length)
    return tasks


def statement_batches(
    trials: Trials, first_token: int, model: LanguageModel, batch_tokens: int
) -> list[Batch]:
    """Return batches of trials: 1 if the answer is the most likely next token, else 0."""
    prompts = trials.prompts[:, -(model.context or trials.prompts.shape[1]) :].copy()
    prompts[:, 0] = first_token
    size = max(1, batch_tokens // prompts.shape[1])

    @torch.no_grad()
    def read(first: int) -> list[Value]:
        ids = torch.from_numpy(prompts[first : first + size]).to(model.device)

        def next_tokens(part: slice) -> Tensor:
            return model(ids[part], last=1)[:, -1].argmax(dim=-1)

        predicted = model.in_passes(next_tokens, ids, batch_tokens).cpu().numpy()
        hits = predicted == trials.answers[first : first + size]
        return [(number, STATEMENTS, float(hit)) for number, hit in enumerate(hits, first)]

    return [partial(read, first) for first in range(0, len(prompts), size)]
