"""Looking at attention during training: the probe's numbers in the metrics, of layers and in all.

That a run with it is bitwise the run without stands with the measurements of lengths.
"""

from __future__ import annotations

import pytest
import torch

from tests.training.test_lengths import without_monitors
from tests.training.test_run import assert_same_tensors, checkpoint_of, rows_of
from trainer.analysis.attention import MEASURES, probe
from trainer.data.corpus import prepare_corpus
from trainer.data.dataset import held_out_windows
from trainer.runs.checkpoints import load_decoder, read_state


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("graphs_as_they_are")
def test_the_last_row_is_the_probe_of_the_saved_model(run, compiled):
    config, _ = run(monitor={"probe_every": 4}, trainer={"compile": compiled})
    corpus = prepare_corpus(config.data, config.tokenizer)
    ids = held_out_windows(corpus.validation, 2, 32)
    ids[:, 0] = corpus.end_of_text
    model = load_decoder(checkpoint_of(config), read_state(checkpoint_of(config)))
    expected, row = probe(model, torch.from_numpy(ids)), rows_of(config)[-1]
    for name in MEASURES:
        for layer, value in enumerate(expected[name]):
            assert row[f"probe/{name}/layer_{layer:02}"] == pytest.approx(value, rel=1e-5)
        whole = max if name == "largest_logit" else lambda values: sum(values) / len(values)
        assert row[f"probe/{name}"] == pytest.approx(whole(expected[name]), rel=1e-5)


def test_it_looks_at_both_sides_of_the_drop(run, finished):
    config, _ = run(monitor={"probe_every": 4})
    rows = {row["step"]: row for row in rows_of(config)}
    assert [step for step, row in rows.items() if "probe/distance" in row] == [4, 6, 8, 12]
    plain, _ = finished
    assert_same_tensors(checkpoint_of(plain), checkpoint_of(config))
    assert without_monitors(rows_of(config)) == rows_of(plain)
