"""The drill finds nothing in a sound program, and finds what is planted in a broken one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SETUP = """
import signal, sys
from trainer.workflows import drill
from trainer.workflows.drill import Fault
"""

FEW = "drill.FAULTS = (Fault('kill', 14), Fault('stop', 12, signal.SIGTERM))\n"

PLANTS = {
    "nothing": "",
    "a sample skipped at resume": """
from trainer.data.dataset import CountingSampler
original = CountingSampler.__init__
def skipping(self, *args, start=0, **options):
    original(self, *args, start=start, **options)
    if start:
        self.skips = [[start, 1]]
CountingSampler.__init__ = skipping
""",
    "the optimizer reset once more": """
from trainer.training.callbacks.resume import Resume
original = Resume.on_fit_start
def forgetful(self, trainer, module):
    original(self, trainer, module)
    trainer.optimizers[0].state.clear()
Resume.on_fit_start = forgetful
""",
    "the drop forgotten": """
from trainer.training import run
class Forgetful:
    from_dict = staticmethod(lambda values: drill.LAYOUT)
run.Layout = Forgetful
original = run.make_decoder
def remember(*args):
    model = original(*args)
    drill.LAYOUT = model.layout
    return model
run.make_decoder = remember
""",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_drill_notices_what_is_planted(tmp_path, plant):
    script = tmp_path / "script.py"
    script.write_text(
        SETUP + FEW + PLANTS[plant] + "from trainer.__main__ import main\n"
        "main(['drill', '+experiment=drope_demo', 'optimizer=adamw'])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    sound = plant == "nothing"
    assert done.returncode == (0 if sound else 1), done.stdout + done.stderr
    assert ("2 of 2 survived" in done.stdout) == sound
    assert ("instead of" in done.stdout) == (not sound)
