"""What two ranks share: ``torchrun --nproc-per-node=2 two_ranks.py``."""

import time
from pathlib import Path

from trainer.common.processes import current_ranks
from trainer.common.ranks import (
    all_gather,
    any_rank,
    on_rank_zero,
    process_group,
    shared_value,
)

rank = current_ranks().rank
print("told:", shared_value(lambda: [time.sleep(0.5), rank]))
time.sleep(0.5 * rank)
with process_group("ddp"):
    print("result:", on_rank_zero(lambda: 3 + rank))
    try:
        on_rank_zero(Path("nowhere").stat)
    except OSError as error:
        print("error:", type(error).__name__, error.filename)
    print("gathered:", all_gather(10 * rank))
    print("wishes:", any_rank(False, rank == 1, True))
