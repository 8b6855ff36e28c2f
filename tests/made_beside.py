"""A model that another thread makes while a step is under way: it keeps the state of torch's generator and draws."""

import threading
import time
from contextlib import contextmanager

import torch

from mlsm.common.device import spare_randomness


@contextmanager
def models_made_during(monkeypatch, owner, name):
    """While in the block, owner.name first starts such a thread, and lets it draw if nothing keeps it from that."""
    original, threads = getattr(owner, name), []

    def make(entered):
        with spare_randomness():
            torch.rand(1000)
            entered.set()
            time.sleep(0.2)  # meanwhile the step draws

    def replaced(*args):
        entered = threading.Event()
        threads.append(threading.Thread(target=make, args=(entered,)))
        threads[-1].start()
        entered.wait(0.2)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, replaced)
        yield threads
    for thread in threads:
        thread.join()
