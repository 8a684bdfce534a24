"""Importing this before torch makes waiting CPU threads spin briefly.

OpenMP's threads spin while they wait for each other. Beside another program that makes training 5
to 8 times slower; a short spin costs nothing on idle cores. The runtime reads these variables when
torch loads it: GNU's in loop counts, LLVM's and Intel's in milliseconds. What the user set stays.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("KMP_BLOCKTIME", "1")
