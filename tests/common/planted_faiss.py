"""A child of mlsm/common/faiss_gpu.py whose "GPU" is an index of the CPU that does what $MLSM_PLANTED says.

MLSM_PLANTED=crash python -m planted_faiss DIRECTORY
"""

import os
import sys
from pathlib import Path

import faiss

from mlsm.common import faiss_gpu


def to_gpus(index, gpus):
    does = os.environ["MLSM_PLANTED"]
    if does == "crash":
        os.abort()  # as faiss does after an error of CUDA
    if does == "fail":
        raise RuntimeError("no kernel image is available for execution on the device")
    if does == "lack_memory":
        raise RuntimeError("Error: 'err == cudaSuccess' failed: cudaMalloc error out of memory [2]")
    return index


if __name__ == "__main__":
    faiss.index_cpu_to_gpus_list = to_gpus
    faiss_gpu.main(Path(sys.argv[1]))
