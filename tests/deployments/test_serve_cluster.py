"""The graph on a real Ray Serve cluster, in both wirings, through the official client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.serve

WIRINGS = ("colocated", "separate")
RULES = [
    {"match": "endless", "pieces": ["a ", "b "], "eos": False, "delay_ms": 5},
    {"match": "alphabet", "pieces": ["DEF", "GH", "IJ", "KL"]},
    {"match": "fruit", "pieces": ["I ", "like ", "kum", "quat", " pie"]},
    {"match": "fail", "pieces": ["one ", "two ", "three "], "fail_after": 2, "delay_ms": 20},
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One cluster for all tests here; afterwards nothing of it may be left."""
    from shoal.deployments.local_cluster import ClusterOptions, LocalCluster, descendants, free_port

    before = {pid for pid, _ in descendants(os.getpid())}
    cluster = LocalCluster(ClusterOptions(port=free_port(), ingress="proxy", num_cpus=8))
    try:
        cluster.start()
        cluster.start_serve()
        assert cluster.token_path.stat().st_mode & 0o777 == 0o600
        directory = cluster.token_path.parent
        yield cluster
    finally:
        cluster.stop()
    assert {pid for pid, _ in descendants(os.getpid())} <= before
    assert not directory.exists()


def deploy(cluster: Any, name: str, wiring: str, **sections: Any) -> str:
    from shoal.configs.app import AppConfig
    from shoal.deployments.app import build

    wiring_section = {"wiring": {"mode": wiring, "call_timeout_s": 60}}
    config = AppConfig.model_validate({**sections, **wiring_section})
    cluster.run(build(config), name, f"/{name}")
    return f"http://127.0.0.1:{cluster.port}/{name}"


@pytest.fixture(scope="module")
def scripted(cluster: Any, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Wiring -> URL of a gateway with a scripted model and a deny-list."""
    directory = tmp_path_factory.mktemp("scripted")
    script = directory / "test-model.json"
    default = {"pieces": ["Hello", ", ", "world", "!"]}
    script.write_text(json.dumps({"tokenizer": str(tiny_tokenizer), "rules": RULES, "default": default}))
    deny_list = directory / "deny.txt"
    deny_list.write_text("\\bkumquat\\b\n")
    sections = {
        "engine": {"model": f"scripted:{script}", "max_model_len": 2048},
        "guard": {"deny_list": str(deny_list), "check_input": True},
        "gateway": {"heartbeat_s": 0.2, "drain_s": 2.0},
    }
    return {wiring: deploy(cluster, wiring, wiring, **sections) for wiring in WIRINGS}


@pytest.fixture(params=WIRINGS)
def url(request: pytest.FixtureRequest, scripted: dict[str, str]) -> str:
    return scripted[request.param]


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30.0) as client:
        yield client


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def metrics(url: str) -> dict[tuple[str, str], float]:
    """(name, labels as text) -> value."""
    values = {}
    for line in httpx.get(f"{url}/metrics", timeout=10.0).text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            values[name, labels] = float(value)
    return values


def is_idle(url: str) -> bool:
    values = metrics(url)
    busy = [
        value
        for (name, labels), value in values.items()
        if name in ("shoal_sequences_running", "shoal_sequences_waiting")
        or (name == "shoal_kv_blocks" and 'state="used"' in labels)
    ]
    assert len(busy) == 3
    return not any(busy)


def wait_until_idle(url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_idle(url):
        assert time.monotonic() < deadline, "sequences or blocks are still in use"
        time.sleep(0.05)


def test_the_cluster_is_closed_to_whoever_has_no_token(cluster: Any, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    program = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); print('connected')"
    answers = {}
    for name, token in (("right", cluster.token_path), ("wrong", wrong)):
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        command = [sys.executable, "-c", program, address]
        answers[name] = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "connected" in answers["right"].stdout, answers["right"].stderr
    assert "connected" not in answers["wrong"].stdout
    assert "token" in answers["wrong"].stderr.lower()


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="test-model", messages=user("hi"), n=2, logprobs=True, top_logprobs=1)
    assert [choice.message.content for choice in answer.choices] == ["Hello, world!"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].token
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream(client: Any) -> None:
    stream = client.chat.completions.create(
        model="test-model", messages=user("hi"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens > 0


def test_completions_stop_and_logprobs(client: Any) -> None:
    answer = client.completions.create(model="test-model", prompt="alphabet", stop=["IJ"], logprobs=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("DEFGH", "stop")
    assert len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.token_logprobs)
    chunks = client.completions.create(model="test-model", prompt="alphabet", stop=["IJ"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "DEFGH"


def test_scoring_a_prompt(client: Any) -> None:
    answer = client.completions.create(model="test-model", prompt="the fox", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "the fox"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["test-model"]
    assert client.models.retrieve("test-model").id == "test-model"


def test_errors_have_the_clients_types(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=user("hi"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="test-model", messages=user("hi"), temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="test-model", prompt=[5] * 3000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as template:
        client.chat.completions.create(
            model="test-model", messages=[*user("hi"), {"role": "system", "content": "late"}]
        )
    assert "System must come first" in template.value.message


def test_a_failure_in_the_middle_of_a_stream(client: Any) -> None:
    chunks = []
    stream = client.chat.completions.create(model="test-model", messages=user("fail"), stream=True)
    with pytest.raises(openai.APIError, match="failed after 2 tokens"):
        chunks.extend(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).startswith("o")


def test_rails(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="test-model", messages=user("a kumquat"))
    assert refused.value.code == "content_filter"
    chunks = list(client.chat.completions.create(model="test-model", messages=user("fruit"), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I like "
    assert chunks[-1].choices[0].finish_reason == "content_filter"


def test_a_timeout_of_the_client_ends_the_request(client: Any, url: str) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(model="test-model", prompt="endless", max_tokens=1500)
    wait_until_idle(url, 3.0)


def test_a_stream_that_is_closed_ends_the_request(client: Any, url: str) -> None:
    stream = client.completions.create(model="test-model", prompt="endless", max_tokens=1500, stream=True)
    for number, _ in enumerate(stream):
        if number == 5:
            break
    stream.close()
    wait_until_idle(url, 3.0)


def test_tokens_arrive_as_they_are_made(url: str) -> None:
    arrivals = []
    body = {"prompt": "endless", "max_tokens": 40, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30.0) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
    assert arrivals[-1] - arrivals[0] > 0.1
    assert len(arrivals) > 10


def test_health_and_metrics(url: str) -> None:
    assert httpx.get(f"{url}/health/ready").json() == {"status": "ready"}
    assert httpx.get(f"{url}/health/live").status_code == 200
    names = {name for name, _ in metrics(url)}
    assert {"shoal_time_to_first_token_seconds_count", "shoal_http_requests_total"} <= names


async def test_five_hundred_requests_with_a_hundred_hang_ups(url: str) -> None:
    rng = random.Random(3)
    gate = asyncio.Semaphore(16)
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits) as http:

        async def one(number: int) -> None:
            hang_up = number % 5 == 0
            words = "endless " if hang_up or number % 3 == 0 else "the quick brown fox "
            body = {
                "prompt": words * 4,
                "max_tokens": 1500 if hang_up else rng.randint(1, 8),
                "stream": number % 2 == 0,
            }
            async with gate:
                if not hang_up:
                    assert (await http.post("/v1/completions", json=body)).status_code == 200
                    return
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0.01, 0.4)):
                        await http.post("/v1/completions", json=body)

        await asyncio.gather(*(one(number) for number in range(500)))
    await asyncio.to_thread(wait_until_idle, url, 10.0)


@pytest.mark.real_model
def test_greedy_and_seeded_answers_do_not_depend_on_the_wiring(cluster: Any, smollm2: Any) -> None:
    engine = {"model": "smollm2-135m", "max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory": "64MiB"}
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    answers = {}
    for wiring in WIRINGS:
        url = deploy(cluster, f"real-{wiring}", wiring, engine=engine, gateway={"drain_s": 1.0})
        greedy = httpx.post(
            f"{url}/v1/completions", json={"prompt": prompts, "max_tokens": 24, "temperature": 0}, timeout=120.0
        ).json()
        seeded = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": prompts[0], "max_tokens": 24, "temperature": 1.0, "seed": 11, "n": 2},
            timeout=120.0,
        ).json()
        answers[wiring] = [choice["text"] for body in (greedy, seeded) for choice in body["choices"]]
    assert answers["colocated"] == answers["separate"]
    assert answers["colocated"][3] != answers["colocated"][4]
