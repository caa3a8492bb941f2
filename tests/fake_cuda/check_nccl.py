"""Run on two pretended devices with the fake NCCL between them: what a worker of a GPU of its own does.

``python check_nccl.py TRAINING PLAN ...`` prints, for each plan, the difference from one device, the laws that the
launches break, and where the host would wait for its device in the last step.
"""

from __future__ import annotations

import json
import sys

from tests.support.nccl.launch_laws import list_violations
from tests.support.nccl.recording import record_training

if __name__ == "__main__":
    name, *plans = sys.argv[1:]
    for plan in plans:
        recording = record_training(name, plan, 2, steps=4, clip_norm=None, start_method="spawn")
        found = [recording.difference, list_violations(recording.launches), dict(recording.waits)]
        print(json.dumps([plan, *found]), flush=True)
