"""Two ranks whose run ends early: ``torchrun --nproc-per-node=2 leaving_ranks.py RUN KIND``."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from trainer.common.errors import DivergedError, PreemptedError
from trainer.runs.config import RunConfig
from trainer.runs.parsing import parse
from trainer.runs.ranks import current_ranks
from trainer.training import loggers
from trainer.workflows import experiment

STOPS = {
    "PreemptedError": PreemptedError("stopped"),
    "DivergedError": DivergedError.at("trainer.rewind_after", "diverged."),
}
config = parse(RunConfig, json.loads(Path(sys.argv[1]).read_text()))
uploaded = Path("uploaded")


def finish():
    """Upload for as long as another rank would need to leave."""
    time.sleep(1)
    uploaded.touch()


def train(*_, **__):
    """Stop with a dashboard that has rows to send."""
    if current_ranks().is_rank_zero:
        dashboard = SimpleNamespace(name="run", offline=False, url="", finish=finish)
        loggers._kept["id"] = dashboard
    raise STOPS[sys.argv[2]]


experiment.train = train
try:
    experiment.run_experiment(config)
except (PreemptedError, DivergedError) as error:
    lock = Path(config.run_dir, ".lock").read_text()
    print(error, "uploaded" if uploaded.exists() else "lost", "locked" if lock else "free")
