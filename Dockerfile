# syntax=docker/dockerfile:1
# drafttrain with everything that a CPU needs, or with CUDA (docs/how-to/docker.md):
#   docker build -t drafttrain:cpu .
#   docker build -t drafttrain:cuda --build-arg TORCH=cuda .
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

# cpu, or cuda: the build of the package index, which brings CUDA's libraries; the driver comes from the host.
ARG TORCH=cpu
# Of pyproject.toml; mooncake needs libibverbs1 too.
ARG EXTRAS=deepspeed,gguf,peft,plots,wandb

# drafttrain's CPU kernels and Triton's launchers are compiled on first use.
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean \
    && apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

# Three layers, from what changes least to what changes most: torch, the other pinned dependencies, the package.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,source=constraints.txt,target=/source/constraints.txt \
    if [ "$TORCH" = cpu ]; then set -- --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple; fi \
    && pip install -c /source/constraints.txt "$@" torch

RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,source=constraints.txt,target=/source/constraints.txt \
    --mount=type=bind,source=pyproject.toml,target=/source/pyproject.toml \
    python -c "import tomllib; project = tomllib.load(open('/source/pyproject.toml', 'rb'))['project']; \
extras = [one for name in '$EXTRAS'.split(',') if name for one in project['optional-dependencies'][name]]; \
print(*project['dependencies'], *extras, sep='\n')" > /tmp/requirements.txt \
    && pip install -c /source/constraints.txt -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt

RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,target=/source,rw \
    pip install --no-deps "/source"

# Any user may run the image (docker run --user "$(id -u):$(id -g)"), so that results belong to who started it.
RUN useradd --create-home --uid 1000 drafttrain \
    && mkdir /cache /work \
    && chmod 1777 /cache /work /home/drafttrain
ENV HOME=/home/drafttrain USER=drafttrain HF_HOME=/cache/huggingface DRAFTTRAIN_CACHE=/cache/drafttrain TRITON_CACHE_DIR=/cache/triton
USER 1000
WORKDIR /work
VOLUME /cache
ENTRYPOINT ["drafttrain"]
