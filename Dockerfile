# Images with furlong: `docker build --target cpu -t furlong:cpu .` and `docker build --target cuda -t furlong:cuda .`
#
#   docker run --rm furlong:cpu quickstart
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v "$PWD:/work" furlong:cuda train ...
#
# Sandboxes of agents (bubblewrap) need user namespaces in the container: --security-opt seccomp=unconfined.

FROM python:3.12-slim-bookworm AS cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# gcc: PyTorch compiles kernels with it
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc g++ git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/furlong
COPY pyproject.toml README.md LICENSE ./
COPY src src
# pyproject.toml has the versions. Without CUDA's libraries, most of 7 GB: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=""
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[ray]"
WORKDIR /work
ENTRYPOINT ["furlong"]
CMD ["--help"]

FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS cuda
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc g++ git libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
WORKDIR /opt/furlong
COPY pyproject.toml README.md LICENSE ./
COPY src src
# hadolint ignore=DL3013
RUN python3 -m venv "$VIRTUAL_ENV" && pip install --no-cache-dir ".[ray,sglang,megatron]"
WORKDIR /work
ENTRYPOINT ["furlong"]
CMD ["--help"]
