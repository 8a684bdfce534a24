"""A rank that ends as it is told: ``watched.py RANK:HOW ...``; the others wait for ever."""

import os
import signal
import sys
import time

from trainer.common import watch as watch_module
from trainer.common.processes import current_ranks
from trainer.common.ranks import meeting_store
from trainer.common.watch import End, Watch

rank = current_ranks().rank
watch_module.requeue = lambda reason: print("requeue:", reason, flush=True)
ends = dict(word.split(":") for word in sys.argv[1:])
how = ends.get(str(rank))
if how == "late":
    time.sleep(4)
watch = Watch(meeting_store())
if how == "killed":
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("done", "late"):
    sys.exit(watch.leave(End(rank, "done", 0)))
if how == "failed":
    sys.exit(watch.leave(End(rank, "failed"), f"error of rank {rank}"))
if how:
    sys.exit(watch.leave(End(rank, "stopped", 85, how), f"stop of rank {rank}"))
time.sleep(100)
