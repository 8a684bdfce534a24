"""Problems of an evaluation's configuration, key by key, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.longbench import LongBenchSettings
from trainer.evaluation.needles import NeedleTaskSettings


def test_no_task_makes_more_than_its_limit():
    usual = EvaluationConfig(needles=NeedleTaskSettings(trials=50))
    limited = replace(usual, ruler=replace(usual.ruler, trials=3)).limited(9, 8)
    trials = limited.needles.trials, limited.ruler.trials, limited.many_shot.trials
    assert (*trials, limited.longbench.limit) == (9, 3, 9, 8)
    fewer = replace(usual, longbench=LongBenchSettings(limit=2)).limited(9, 8)
    assert fewer.longbench.limit == 2


def test_configurations_need_no_torch():
    """A mistake on the command line is then reported without the start-up time of torch."""
    code = "import sys, trainer.runs.config, trainer.runs.parsing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lengths_in_tokens_take_the_place_of_multiples():
    config = EvaluationConfig(tokens=[96, 64, 100], methods=["none"], tasks=["perplexity"])
    assert config.in_tokens(64) == [96, 64, 100]
    assert config.in_multiples(64).lengths == [1.5, 1.0, 1.5625]
    assert config.in_multiples(64) == replace(
        config, lengths=[1.5, 1.0, 1.5625], tokens=None, training_length=64
    )
    assert EvaluationConfig(lengths=[0.5, 2], training_length=32).in_tokens(64) == [16, 64]
    # Every length is the same number of tokens again, whatever C.
    for C in (3, 7, 63, 8192):
        every = list(range(2, 2000, 7))
        assert EvaluationConfig(tokens=every).in_multiples(C).in_tokens(C) == every
