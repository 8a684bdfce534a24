"""What processes that tests/program.py starts have imported and read before they are forked."""

import trainer

# isort: split
import gc

import torch

import trainer.report.pages
import trainer.workflows.analyze
import trainer.workflows.experiment  # noqa: F401
from trainer.commands import compose_words, run_of
from trainer.config import DataConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus

torch.set_num_threads(1)
run_of(compose_words(["+experiment=drope_demo"]))
compose_words([])
prepare_corpus(DataConfig(), TokenizerConfig())  # keeps the text of Python's documentation
gc.collect()
gc.freeze()  # as a collection would copy every page that it marks
