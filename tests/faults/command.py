"""cli.py with the knobs that no user needs: MLSM_TEST_LAYOUT=cuda overlaps all stages, as on a GPU, and
MLSM_TEST_SAVE_ALWAYS=1 saves the state of dictionary learning at every evaluation."""

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored

if __name__ == "__main__":
    if layout := os.environ.get("MLSM_TEST_LAYOUT"):
        from pipeline.coding.coder import LAYOUTS

        LAYOUTS["cpu"] = LAYOUTS[layout]
    if "MLSM_TEST_SAVE_ALWAYS" in os.environ:
        from pipeline.dictionary import checkpoint as learning_checkpoint

        learning_checkpoint.SECONDS_BETWEEN = 0
    import cli

    cli.main()
