"""Starting a script on several processes of this machine, as torchrun does, with what goes wrong shown once."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

GRACE = 5.0
"""Seconds that the processes have to end when they are told to."""


def launch(script: str, arguments: Sequence[str], nproc: int) -> int:
    """Run ``script arguments`` as ranks 0 to nproc - 1 by torch's elastic launcher; the exit status, 0 if all is well.

    What a rank prints comes through; of a failure the launcher adds one line. An interrupt ends all processes, and the
    status is then 128 plus the signal's number. Raises ValueError where there is no such script.
    """
    if not Path(script).is_file():
        raise ValueError(f"script: there is no file {script}")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # its log repeats what the ranks say
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHELASTIC_EXIT_GRACE_PERIOD", str(GRACE))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", script, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by signal {-failure.exitcode}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
        print(f"autopart: rank {rank} {how}; all {nproc} processes have ended", file=sys.stderr)
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except KeyboardInterrupt:
        return 130
    return 0
