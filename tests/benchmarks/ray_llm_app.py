"""Ray Serve LLM with a vLLM engine on this machine's CPU, for the comparison:  ray_llm_app.py MODEL_DIR NAME PORT DTYPE

Runs in the peers' own environment, not in Shoal's. Ends, with everything that it started, on SIGINT or SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ray
from ray import serve

LOGICAL_CPUS = 16
"""More than there are, so that Serve's controller, proxy, ingress and engine all find a place on two cores."""
PASSED_ON = ("VLLM_", "HF_", "OMP_", "TRANSFORMERS_", "TORCHINDUCTOR_")


def main() -> None:
    model, name, port, dtype = Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    runtime_env = {"env_vars": {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}}
    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=300 << 20,
        runtime_env=runtime_env,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": name, "model_source": str(model)},
        accelerator_config={"kind": "cpu"},
        engine_kwargs={
            "dtype": dtype,
            "max_model_len": 8192,
            "max_num_seqs": 64,
            "distributed_executor_backend": "mp",
        },
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 256},
        runtime_env=runtime_env,
        log_engine_metrics=False,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        serve.run(build_openai_app({"llm_configs": [config]}), name="llm")
        while True:
            signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
