"""Sums of what was read: of all steps, and of the last one."""

from __future__ import annotations

import torch

from trainer.data.order import as_text
from trainer.training import certificate as certificates
from trainer.training.certificate import Certificate


def of(total, last):
    return {"samples": as_text(total), "last_step": as_text(last)}


def test_hashes_add_up_over_micro_batches_and_steps():
    found = Certificate()
    assert found.state() == of(0, 0)
    for begins, hashes in ((True, [1, 2]), (False, [4]), (True, [8]), (False, [16, 32])):
        found.add(torch.tensor(hashes), begins_step=begins)
    assert found.state() == of(63, 56)


def test_sums_wrap_round_at_2_to_the_64():
    found = Certificate()
    found.add(torch.tensor([2**62, 2**62, 2**62, 2**62 + 5]), begins_step=True)
    assert found.state() == of(5, 5)


def test_a_sum_goes_on_and_the_part_before_is_added_once(monkeypatch):
    """Of two ranks, which read the same here."""
    monkeypatch.setattr(certificates.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(certificates.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(certificates.dist, "all_reduce", lambda x: x.mul_(2))
    found = Certificate()
    found.load(of(100, 7))
    assert found.state() == of(100, 7)
    found.add(torch.tensor([3]), begins_step=True)
    assert found.state() == of(106, 6)
    assert found.state() == of(106, 6)
    monkeypatch.setattr(certificates.dist, "get_world_size", lambda: 1)
    assert found.state() == of(103, 3)
