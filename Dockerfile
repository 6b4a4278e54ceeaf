# docker build --tag moe_ext .
# For CPU. For CUDA give both stages a base with nvcc and Python, take torch from another index, and set MOE_EXT_CUDA=1.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} torch==2.13.0 \
    && pip install --no-cache-dir matplotlib scikit-learn tensorboard tqdm
COPY . /moe_ext
WORKDIR /moe_ext
RUN MOE_EXT_CUDA=0 pip install --no-cache-dir --no-deps .

FROM python:3.12-slim
COPY --from=build /venv /venv
COPY --from=build /moe_ext/examples /work/examples
WORKDIR /work
ENV PATH=/venv/bin:$PATH
RUN python -m moe_ext info
