"""What two ranks share: ``torchrun --nproc-per-node=2 two_ranks.py``."""

from pathlib import Path

from trainer.common.ranks import all_gather, any_rank, on_rank_zero, process_group

with process_group("ddp") as ranks:
    print("result:", on_rank_zero(lambda: 3 + ranks.rank))
    try:
        on_rank_zero(Path("nowhere").stat)
    except OSError as error:
        print("error:", type(error).__name__, error.filename)
    print("gathered:", all_gather(10 * ranks.rank))
    print("wishes:", any_rank(False, ranks.rank == 1, True))
