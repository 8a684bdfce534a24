"""Passes over the rows of a batch: their sizes, and those that run at the same time."""

import threading

import pytest
import torch

from trainer.model.threads import side_by_side


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_parts_are_read_at_the_same_time_with_one_thread_each_and_without_gradients(two_threads):
    """Each of two parts waits until the other is being read."""
    meet = threading.Barrier(2)

    def read(part):
        meet.wait(timeout=60)
        return part, torch.get_num_threads(), torch.is_grad_enabled()

    assert side_by_side(read, range(6), 2) == [(part, 1, False) for part in range(6)]
    assert torch.get_num_threads() == 2
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_are_read_in_the_modes_of_who_asks_but_without_gradients(two_threads, workers):
    def read(_):
        x = torch.ones(2, 2, requires_grad=True)
        return (x @ x).dtype, x.is_inference(), torch.is_grad_enabled()

    with torch.inference_mode():
        assert side_by_side(read, range(3), workers) == [(torch.float32, True, False)] * 3
    with torch.autocast("cpu", torch.bfloat16):
        assert side_by_side(read, range(3), workers) == [(torch.bfloat16, False, False)] * 3


def test_an_error_in_a_part_is_raised_and_threads_stay_as_they_were(two_threads):
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda part: 1 / part, [1, 0, 2], 2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("rows", "length", "batch_tokens", "expected"),
    [
        (16, 8, 64, [8, 8]),
        (16, 8, 71, [8, 8]),
        (3, 8, 4, [1, 1, 1]),
        (20, 8, 10**9, [10, 10]),  # not 16 and 4
        (40, 8, 10**9, [10, 10, 10, 10]),  # not three passes for two threads
        (16, 8, 10**9, [16]),
        (2, 1000, 10**9, [1, 1]),
    ],
)
def test_passes_hold_what_is_allowed_and_fits_in_a_cache(
    tiny_decoder, monkeypatch, two_threads, rows, length, batch_tokens, expected
):
    """A cache holds 128 tokens; whoever reads too many for it has all threads."""
    model = tiny_decoder()
    monkeypatch.setattr("trainer.model.language_model.IN_CACHE", 128 * model.config.hidden_size)
    ids = torch.arange(rows)[:, None].expand(rows, length)
    threads = set()

    def read(part):
        threads.add(torch.get_num_threads())
        first = ids[part, 0]
        return torch.stack([first, torch.full_like(first, len(first))], dim=1)

    results = model.in_passes(read, ids, batch_tokens)
    assert results[:, 0].tolist() == [*range(rows)]
    assert results[:, 1].tolist() == [size for size in expected for _ in range(size)]
    assert threads == {1 if length <= 128 and len(expected) > 1 else 2}
