"""What onbeat demands of a vLLM server, and how it says what is wrong. A small server plays the wrong ones."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from onbeat.config import Config
from onbeat.environment import EXACT_ENVIRONMENT
from onbeat.errors import InputError, NumbersError, WorkerError
from onbeat.rollout import vllm
from onbeat.rollout.vllm.server import (
    Server,
    check_config,
    check_place,
    claim,
    claim_slot,
    command_line,
    server_environment,
    why,
)
from onbeat.rollout.vllm.worker import completion_of, request_body
from onbeat.types import GroupRequest
from tests.fakes.models import request, sampling


def config(lora_rank: int = 0, generator: dict[str, Any] | None = None, **vllm: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"path": "none", "max_prompt_tokens": 96},
            "reward": {"functions": ({"path": "exact_match"},)},
            "sampling": {"max_new_tokens": 32},
            "lora": {"rank": lora_rank},
            "generator": {"backend": "vllm", "vllm": vllm, **(generator or {})},
        }
    )


DESCRIBED = {
    "architectures": ["LlamaForCausalLM"],
    "sizes": {"vocab_size": 16, "hidden_size": 64, "num_hidden_layers": 2},
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 128,
    "max_num_seqs": 32,
    "max_lora_rank": 0,
}


class Playing:
    """Answers with what `says` holds by route; an int is a status."""

    def __init__(self, path: Path) -> None:
        self.says: dict[str, Any] = {
            "/version": {"version": "0.32.0"},
            "/collective_rpc": {"results": [DESCRIBED]},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/inference/v1/generate": 400,
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = outer.says.get(self.path, 404)
                body = json.dumps({"detail": "Not Found"} if isinstance(answer, int) else answer).encode()
                self.send_response(answer if isinstance(answer, int) else 200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = handle_any

            def log_message(self, *words: Any) -> None:
                pass

            def address_string(self) -> str:
                return "here"

        self._server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def playing(tmp_path: Path) -> Iterator[Playing]:
    server = Playing(tmp_path / "s")
    yield server
    server.close()


def check(tmp_path: Path, wanted: Config) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 64, "num_hidden_layers": 2})
    )

    async def run() -> None:
        server = Server(f"unix:{tmp_path}/s")
        try:
            await server.check(wanted, str(tmp_path))
        finally:
            await server.close()

    asyncio.run(run())


def test_a_server_that_ends_a_connection_as_the_next_request_is_sent_loses_none(tmp_path: Path) -> None:
    """As it does with one that was idle for long enough."""
    num_connections = 0

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)  # the next request, or the end
        writer.close()

    async def run() -> None:
        async with await asyncio.start_unix_server(answer_once, tmp_path / "s"):
            server = Server(f"unix:{tmp_path}/s")
            for _ in range(3):
                assert await server.get("/version") == {}
            await server.close()

    asyncio.run(run())
    assert num_connections == 3


def test_a_server_as_it_should_be_passes(playing: Playing, tmp_path: Path) -> None:
    check(tmp_path, config())


@pytest.mark.parametrize(
    ("route", "answer", "sentence"),
    [
        ("/version", {"version": "0.31.2"}, r"is vLLM 0\.31\.2; onbeat drives 0\.32\.x"),
        ("/collective_rpc", 404, r"does not have onbeat's extension .*VLLM_SERVER_DEV_MODE=1 PYTHONPATH=.*extension"),
        (
            "/collective_rpc",
            {"results": [{**DESCRIBED, "sizes": {**DESCRIBED["sizes"], "hidden_size": 576}}]},  # type: ignore[dict-item]
            r"serves another model: .*'hidden_size': 576.* instead of .*'hidden_size': 64.*\(model\.path\)",
        ),
        ("/inference/v1/generate", 403, "takes no tokens; start it with --enable-scale-out"),
        ("/collective_rpc", {"results": [{**DESCRIBED, "logprobs_mode": "raw_logprobs"}]}, "--logprobs-mode processed"),
    ],
)
def test_a_server_that_will_not_do_is_refused_with_the_way_out(
    playing: Playing, tmp_path: Path, route: str, answer: Any, sentence: str
) -> None:
    playing.says[route] = answer
    with pytest.raises(InputError, match=sentence):
        check(tmp_path, config())


def test_a_server_without_room_for_the_adapter_is_refused(playing: Playing, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"adapters of rank 0 at most; start it with .*--max-lora-rank 8"):
        check(tmp_path, config(lora_rank=8))


def test_a_server_that_is_not_there_is_a_lost_worker(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="does not answer /version"):
        check(tmp_path, config())


@pytest.mark.parametrize("place", ["unix:/run/a.sock", "http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8"])
def test_servers_of_this_machine_are_taken(place: str) -> None:
    check_place(place)


@pytest.mark.parametrize("place", ["http://10.0.0.5:8000", "http://vllm.example:80", "https://127.0.0.1", "", "8000"])
def test_servers_that_others_could_reach_are_refused(place: str) -> None:
    with pytest.raises(InputError, match="control routes have no lock"):
        check_place(place)


def test_a_server_on_loopback_that_listens_to_others_as_well_is_refused() -> None:
    with socket.create_server(("", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as here:
        check_place(f"http://127.0.0.1:{here.getsockname()[1]}")
        with pytest.raises(InputError, match="listens to other machines, too"):
            check_place(f"http://127.0.0.1:{everywhere.getsockname()[1]}")


def test_a_server_is_claimed_once_and_slots_are_the_lowest_free_ones() -> None:
    assert claim("some server")
    assert not claim("some server")
    assert claim_slot() < claim_slot()


def test_mistakes_in_the_recipe_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no Python environment there; `make vllm-env` makes one"):
        check_config(config(environment=str(tmp_path / "nowhere")))
    with pytest.raises(InputError, match=r"names 1 servers; generator\.count wants 2"):
        check_config(config(servers=("unix:/a",), generator={"count": 2}))
    for name in ("max_num_seqs", "max_num_seq", "no_enable_scale_out", "disable_log_stats", "trust_remote_code"):
        with pytest.raises(InputError, match=rf"generator\.vllm\.arguments\.{name}: onbeat sets this itself"):
            check_config(config(servers=("unix:/a",), arguments={name: True}))
    check_config(config(servers=("unix:/a",), arguments={"gpu_memory_utilization": 0.8}))


def test_the_recipes_arguments_come_last_and_defaults_can_be_undone() -> None:
    words = command_line(
        config(arguments={"dtype": "bfloat16", "enforce_eager": False, "async_scheduling": False}), "model", "sock"
    )
    assert words[2:4] == ["--model", "model"]
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "--enforce-eager" not in words
    assert "--no-async-scheduling" in words
    assert words[words.index("--max-model-len") + 1] == "128"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--enable-lora" not in words
    lora = command_line(config(lora_rank=5), "model", "sock")
    assert lora[lora.index("--max-lora-rank") + 1] == "8"


def test_servers_share_cores_and_devices_and_see_nothing_of_our_own_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for name, value in EXACT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    two = config(generator={"count": 2})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    environments = [server_environment(two, slot, tmp_path) for slot in (0, 1, 2)]
    assert [one["VLLM_CPU_OMP_THREADS_BIND"] for one in environments] == ["0,1", "2,3", "0,1"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["4", "5", "6"]
    assert {*EXACT_ENVIRONMENT, "VLLM_API_KEY"} & environments[0].keys() == set()
    parallel = server_environment(config(generator={"count": 1}, tensor_parallel=2), 0, tmp_path)
    assert parallel["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert parallel["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_the_reason_is_found_in_a_servers_log() -> None:
    assert why(["usage: vllm serve\n", "vllm serve: error: unrecognized arguments: --no-such\n"]) == (
        "error: unrecognized arguments: --no-such"
    )
    log = [
        "(EngineCore pid=7) ERROR [core.py:1] ValueError: To serve at least one request, 9 GiB are needed\n",
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.\n",
    ]
    assert why(log) == "ValueError: To serve at least one request, 9 GiB are needed"
    assert why(["Killed\n"]) == "see its log"


def asked() -> GroupRequest:
    return request(3, (5, 6, 7), 2, sampling(8, stops=(1,)))


def test_each_sample_has_a_seed_of_its_own_and_samples_from_the_plain_distribution() -> None:
    bodies = [request_body(asked(), sample, "policy") for sample in (0, 1)]
    seeds = {body["sampling_params"]["seed"] for body in bodies}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert bodies[0]["token_ids"] == (5, 6, 7)
    for name, value in {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "temperature": 1.0, "ignore_eos": True}.items():
        assert bodies[0]["sampling_params"][name] == value


def reply(**choice: Any) -> dict[str, Any]:
    whole = {
        "token_ids": [9, 1],
        "logprobs": {"content": [{"token_id": 9, "logprob": -0.5}, {"token_id": 1, "logprob": -0.25}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "0", "start": 0, "end": 2}],
    }
    return {"choices": [{**whole, **choice}]}


def test_a_log_probability_that_is_no_number_means_that_training_has_diverged() -> None:
    content = [{"token_id": 9, "logprob": -9999.0}, {"token_id": 1, "logprob": -0.25}]
    with pytest.raises(NumbersError, match="version 0: the model's logits are not finite"):
        completion_of(reply(logprobs={"content": content}), asked(), 0)


def extension() -> Any:
    path = Path(vllm.__file__).parent / "extension" / "onbeat_vllm.py"
    found = importlib.util.spec_from_file_location("onbeat_vllm", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_layer_that_goes_on_computing_with_the_weights_before_is_noticed() -> None:
    stale_layers = extension().stale_layers
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    before = {"model.layers.0.attn.qkv_proj": b"1", "model.layers.0.o_proj": b"2", "lm_head": b"3"}
    after = {"model.layers.0.attn.qkv_proj": b"4", "model.layers.0.o_proj": b"5", "lm_head": b"6"}
    changed = {"model.embed_tokens.weight", "model.layers.0.attn.k_proj.weight", "model.layers.0.o_proj.weight"}
    assert stale_layers(before, after, changed, packed) == []
    assert stale_layers(before, {**after, "lm_head": b"3"}, changed, packed) == ["lm_head"]
    assert stale_layers(before, before, changed, packed) == list(before)
    assert stale_layers(before, before, set(), packed) == []


def test_a_reply_becomes_a_completion() -> None:
    completion = completion_of(reply(), asked(), 1)
    assert (completion.slot, completion.sample, completion.version) == (3, 1, 0)
    assert (completion.token_ids, completion.sampler_logprobs) == ((9, 1), (-0.5, -0.25))
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    "choice",
    [
        {"finish_reason": "abort"},
        {"weight_versions": [{"version": "default", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 2}]},
        {"weight_versions": None},
        {"token_ids": [9, 1, 1]},
    ],
)
def test_a_reply_that_is_not_whole_or_of_another_version_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match=r"vLLM (ended a completion with|answered from version|sent 3 tokens with 2)"):
        completion_of(reply(**choice), asked(), 0)
