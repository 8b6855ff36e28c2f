# An image for encoding and training, by default for CPUs. We did not build it: we had no container runtime.
#
#   docker build --tag mlsm .
#   docker build --tag mlsm:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=cluster,corpora,eval,gpu .
#   docker run --volume mlsm-runs:/work/runs mlsm encode-lsp --layer 10
#   docker run --gpus all --volume mlsm-runs:/work/runs mlsm:cuda doctor
#
# If you use a directory of the host instead of the volume mlsm-runs, it has to be writable for the image's user (id 1000).
# CUDA's libraries come with the wheels of torch and numba-cuda; the machine needs the driver and nvidia-container-toolkit.
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=cluster,corpora,eval

# Triton, with which torch compiles for a GPU, needs a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mlsm
COPY constraints.txt ./
# torch alone: its index holds few versions of what torch requires, so that comes from PyPI with the rest
RUN pip install --no-cache-dir --no-deps --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

RUN useradd --create-home --uid 1000 mlsm && mkdir --parents /work/runs && chown --recursive mlsm /work
USER mlsm
WORKDIR /work
# on the volume, so that a GPU is tried once and a teacher downloaded once
ENV MLSM_CACHE=/work/runs/.cache/mlsm HF_HUB_CACHE=/work/runs/.cache/huggingface
ENTRYPOINT ["mlsm"]
CMD ["doctor"]
