# syntax=docker/dockerfile:1
# The image for a server on one machine and for the nodes of a Ray cluster.
#
#   docker build -t twinkle:cuda .
#   docker build -t twinkle:cpu --build-arg VARIANT=cpu --build-arg TORCH_PIP_ARGS='--index-url URL' .
#   docker build -t twinkle:ray --build-arg EXTRAS=ray,postgres .
#
# URL is an index of CPU builds of torch; PyTorch's install page lists it. The CUDA build of torch includes the CUDA
# libraries: both variants use the same base image, and the host needs only a driver and the NVIDIA container toolkit.

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ARG VARIANT=cuda
ARG TORCH_PIP_ARGS=
ARG TORCH=torch>=2.11,<2.14
ARG EXTRAS=postgres
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/twinkle
# torch is installed first and alone, so that no other package's requirement selects the build. A wrong build fails here
# and not at the first request.
RUN /opt/twinkle/bin/pip install ${TORCH_PIP_ARGS} "${TORCH}" \
    && /opt/twinkle/bin/python -c "import sys, torch; built = 'cuda' if torch.version.cuda else 'cpu'; sys.exit(built != '${VARIANT}' and f'VARIANT is ${VARIANT}, but pip installed torch for {built}: see TORCH_PIP_ARGS')"
COPY pyproject.toml README.md LICENSE /src/
COPY client /src/client
COPY src /src/src
RUN /opt/twinkle/bin/pip install /src/client "/src[server,${EXTRAS}]"

FROM python:${PYTHON_VERSION}-slim-bookworm
ARG VARIANT=cuda
# Triton compiles its kernel launchers with the system's C compiler. CPU builds of torch have no Triton.
RUN if [ "${VARIANT}" = cuda ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
RUN groupadd --gid 10001 twinkle \
    && useradd --uid 10001 --gid twinkle --home-dir /var/lib/twinkle --shell /usr/sbin/nologin twinkle \
    && install -d -o twinkle -g twinkle -m 0700 /var/lib/twinkle /var/cache/twinkle
COPY --from=build /opt/twinkle /opt/twinkle
COPY deploy/server.yaml /etc/twinkle/server.yaml
ENV PATH=/opt/twinkle/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TWINKLE_HOST=0.0.0.0 \
    TWINKLE_CACHE_DIR=/var/cache/twinkle \
    HF_HOME=/var/cache/twinkle/huggingface
USER 10001:10001
WORKDIR /var/lib/twinkle
# The first volume must outlive the container. The second is a cache of downloads.
VOLUME ["/var/lib/twinkle", "/var/cache/twinkle"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# A large model takes minutes to load, and the port does not answer before that.
HEALTHCHECK --interval=30s --timeout=10s --start-period=20m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/api/v1/healthz', timeout=8)"]
ENTRYPOINT ["twinkle-server"]
CMD ["launch", "--config", "/etc/twinkle/server.yaml"]
