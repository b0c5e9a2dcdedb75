"""Pytest options for one worker per CPU: ``python tools/workers.py MOST``; none for a single CPU."""

import os
import sys
from importlib.util import find_spec

workers = min(len(os.sched_getaffinity(0)), int(sys.argv[1]))
if workers > 1 and find_spec("xdist"):
    print("-n", workers, "--dist worksteal")
