"""How OpenMP's threads wait for each other; imported before torch, which brings the OpenMP runtime."""

import os
import sys


def wait_briefly():
    """A thread that waits spins for a moment and then sleeps, unless the environment says otherwise.

    By default GNU OpenMP spins for milliseconds. On a processor that other programs use too, that keeps the very threads
    it waits for from running: a training step with two threads took 20 times as long beside one busy process.
    """
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


wait_briefly()
