"""Processes of an evaluation: ``torchrun ... verifying_ranks.py NAME...``, checkpoint first."""

import sys

from trainer.runs import checkpoints
from trainer.runs.ranks import join_evaluation

checksum, hashed = checkpoints.checksum, []
checkpoints.checksum = lambda path: hashed.append(path.name) or checksum(path)
join_evaluation(lambda: checkpoints.verify_together(sys.argv[1:]))
checkpoints.read_state(checkpoints.find_checkpoint(sys.argv[1]))
print("hashed:", *hashed)
