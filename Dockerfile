# An image for encoding and training, for CPUs unless told otherwise. Not built here: no container runtime was at hand.
#
#   docker build --tag mlsm .
#   docker build --tag mlsm:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=eval,gpu .
#   docker run --volume "$PWD/runs:/work/runs" mlsm encode-lsp --layer 10
#   docker run --gpus all --volume "$PWD/runs:/work/runs" mlsm:cuda doctor
#
# CUDA's libraries come with the wheels of torch and numba-cuda; the machine brings the driver and nvidia-container-toolkit.
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=eval

WORKDIR /opt/mlsm
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

RUN useradd --create-home mlsm && mkdir /work && chown mlsm /work
USER mlsm
WORKDIR /work
ENTRYPOINT ["mlsm"]
CMD ["doctor"]
