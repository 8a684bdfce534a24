"""The drill finds nothing in a sound program, and finds what is planted in a broken one."""

from __future__ import annotations

import pytest

from tests.program import run

SETUP = """
import signal, sys
from trainer.workflows import drill
from trainer.workflows.drill import Fault
KILL, STOP = Fault('kill', 14), Fault('stop', 12, signal.SIGTERM)
"""
PLANTS = {
    "nothing": "",
    "a sample skipped at resume": """
from trainer.data.dataset import CountingSampler
original = CountingSampler.__init__
def skipping(self, *args, start=0, **options):
    original(self, *args, start=start, **options)
    if start:
        first = self.first
        self.first = lambda step: first(step) + 1
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
from trainer.training import stretch
class Forgetful:
    from_dict = staticmethod(lambda values: drill.LAYOUT)
stretch.Layout = Forgetful
original = stretch.make_decoder
def remember(*args):
    model = original(*args)
    drill.LAYOUT = model.layout
    return model
stretch.make_decoder = remember
""",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_drill_notices_what_is_planted(tmp_path, plant):
    sound = plant == "nothing"
    # Killed while it saves what it is before the drop; two ranks become one.
    some = "KILL, STOP, drill.FAULTS[6], drill.FAULTS[-1]" if sound else "STOP,"
    script = tmp_path / "script.py"
    script.write_text(
        f"{SETUP}drill.FAULTS = {some}\n{PLANTS[plant]}from trainer.__main__ import main\n"
        "main(['drill', '+experiment=drope_demo', 'optimizer=adamw'])\n"
    )
    done = run(script, cwd=tmp_path)
    assert done.returncode == (0 if sound else 1), done.stdout + done.stderr
    assert ("4 of 4 survived" in done.stdout) == sound
    assert ("equal to rounding" in done.stdout) == sound  # what is added up in another order
    assert "Training" not in done.stdout + done.stderr  # is in the logs of the runs
    assert ("instead of" in done.stdout) == (not sound)
