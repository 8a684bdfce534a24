"""An encoding in one file of the user's: the file CONTRIBUTING.md shows, run as it says."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

from trainer.runs.checkpoints import find_checkpoint, read_state

GUIDE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
SMALL = [
    "trainer.max_steps=20", "drop.at=10", "trainer.batch_size=4", "trainer.threads=1",
    "evaluation.needles.trials=8", "evaluation.windows=4", "evaluation.fit_windows=2",
    "evaluation.lengths=[1,2]", "trainer.checkpoint_every=10", "~controls.nope", "~controls.rope",
]  # fmt: skip


def test_encoding_from_a_file_trains_drops_and_evaluates(tmp_path):
    code = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)[1]
    command = re.search(r"```sh\n(python -m trainer .*?)```", GUIDE, re.DOTALL)[1]
    (tmp_path / "my_encoding.py").write_text(code)
    words = shlex.split(command.replace("\\\n", " "))
    result = subprocess.run(
        [sys.executable, *words[1:], *SMALL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs" / "linear"
    before = read_state(find_checkpoint(str(run / "checkpoints" / "before-drop")))
    (spectrum,) = before["layout"]["spectra"]
    slowest = 2 * math.pi / 64
    expected = [slowest * (16 - 15 * m / 15) for m in range(16)]
    assert all(math.isclose(a, b) for a, b in zip(spectrum["inv_freq"], expected, strict=True))
    assert json.loads((run / "report.json").read_text())["drop"]["step"] == 10
