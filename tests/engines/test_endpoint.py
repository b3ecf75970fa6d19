from __future__ import annotations

import gc
import socket
import sys
import threading

import psutil
import pytest

from skote.engines.endpoint import EndpointEngine
from skote.runtime.replica import Replica
from skote.types import UNKNOWN_ID, EngineError, EngineSpec, ReplicaError, Request, Sampling, StoppingEngine, UsageError

U = UNKNOWN_ID
WAIT_S = 30.0
DONE = (0.0, b"data: [DONE]\n\n")
PROMPT = (7, 8, 9)
ANSWERS_OF_LARGER_CHUNKS = (
    "Some chunks hold several tokens, in 1 of 1 answers: all beyond one a chunk are counted at the end, and times "
    "between tokens are those between chunks."
)


def chunk(ids, *, text="x", reason=None):
    return 0.0, {"choices": [{"text": text, "token_ids": ids, "finish_reason": reason}]}


def words(*texts, reason=None):
    return 0.0, {"choices": [{"delta": {"content": "".join(texts)}, "finish_reason": reason}]}


def usage(output, prompt=3):
    return 0.0, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def request(name="a", **keys):
    return Request(name, PROMPT, **{"max_new_tokens": 4} | keys)


def generate(engine, *requests):
    emitted = [[] for _ in requests]
    reasons = engine.generate(list(requests), lambda row, ids: emitted[row].append(list(ids)))
    return reasons, emitted


@pytest.fixture
def connect():
    """`connect(server, **options)`: an engine, closed with the test."""
    engines = []

    def build(server, **options):
        engines.append(EndpointEngine(url=server.url, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def answer(play):
    """Three tokens, two of them at once, with their ids."""
    return play([chunk([5]), chunk([6, 0], reason="length"), usage(3), DONE])


def test_tokens_come_chunk_by_chunk_with_their_ids(fake_server, connect, answer):
    server = fake_server(answer)
    engine = connect(server)
    assert generate(engine, request(ignore_eos=True)) == (["length"], [[[5], [6, 0]]])
    (asked,) = server.asked
    assert asked.path == "/v1/completions"
    assert asked.headers["Accept-Encoding"] == "identity"
    assert asked.body == {
        "model": "tiny",
        "prompt": [7, 8, 9],
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }
    assert engine.describe()["caveats"] == []
    assert engine.describe()["scores"] is False
    with pytest.raises(EngineError, match="no logits"):
        engine.score(request(), [5])


def test_sampling_and_fields_of_ones_own(fake_server, connect, answer):
    server = fake_server(answer, models=("tiny", "other"))
    sampled = request(sampling=Sampling(0.5, top_k=3, top_p=0.9, seed=11))
    generate(connect(server, model="other", extra_body={"max_tokens": 2, "min_p": 0.1}), sampled)
    body = server.asked[0].body
    assert {key: body[key] for key in ("temperature", "top_k", "top_p", "seed", "model", "max_tokens", "min_p")} == {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 11, "model": "other", "max_tokens": 2, "min_p": 0.1,
    }  # fmt: skip


def test_a_server_of_openais_own_fields_alone(fake_server, connect, answer):
    server = fake_server(answer)
    engine = connect(server, extensions=False)
    generate(engine, request(ignore_eos=True))
    assert {"return_token_ids", "ignore_eos"} & set(server.asked[0].body) == set()
    (caveat,) = engine.describe()["caveats"]
    assert caveat.startswith("ignore_eos was not sent, and answers ended early, in 1 of 1 answers: set endpoint.ext")
    generate(engine, request(ignore_eos=True, max_new_tokens=3))
    assert "in 1 of 2 answers" in engine.describe()["caveats"][0]
    with pytest.raises(UsageError, match="no top_k"):
        generate(engine, request(sampling=Sampling(1.0, top_k=3)))


def test_stops_are_the_servers_to_obey(fake_server, connect, answer):
    server = fake_server(answer)
    engine = connect(server)
    assert isinstance(engine, StoppingEngine)  # no worker ends its answers, whose last counts would then be lost
    generate(engine, request(stop_strings=("\n", "End"), stop_ids=(2, 3)))
    asked = server.asked[0].body
    assert (asked["stop"], asked["stop_token_ids"]) == (["\n", "End"], [2, 3])
    plain = connect(server, extensions=False)
    generate(plain, request(stop_strings=("\n",)))
    assert server.asked[1].body["stop"] == ["\n"]
    with pytest.raises(UsageError, match="no stop_token_ids"):
        generate(plain, request(stop_ids=(2,)))


def test_a_chat_is_sent_the_prompts_text(fake_server, connect, play, make_checkpoint, write_tokenizer):
    directory = make_checkpoint()
    write_tokenizer(directory)
    role = (0.0, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    server = fake_server(play([role, words("a"), words("bc"), words(reason="stop"), usage(3, prompt=9), DONE]))
    engine = connect(server, api="chat", local_dir=str(directory))
    assert generate(engine, request()) == (["stop"], [[[U], [U], [U]]])
    assert server.asked[0].path == "/v1/chat/completions"
    assert server.asked[0].body["messages"] == [{"role": "user", "content": "w7 w8 w9"}]
    assert engine.describe()["caveats"] == [
        "The server counts other prompts than were meant, in 1 of 1 answers: first 9 tokens in place of 3.",
        "The server does not tell the ids of its tokens, in 1 of 1 answers.",
        ANSWERS_OF_LARGER_CHUNKS,
    ]


def test_tokens_that_nobody_counts_are_chunks_and_a_caveat_says_so(fake_server, connect, play):
    engine = connect(fake_server(play([words("a"), words("b", reason="length"), DONE])))
    assert generate(engine, request()) == (["length"], [[[U], [U]]])
    assert (
        "Tokens were counted by chunk in 1 of 1 answers: the server tells neither ids nor counts."
        in (engine.describe()["caveats"])
    )


def test_a_server_that_contradicts_itself(fake_server, connect, play):
    engine = connect(fake_server(play([chunk([5, 6], reason="stop"), usage(1), DONE])))
    generate(engine, request())
    assert engine.describe()["caveats"] == [
        "The server reports other numbers of tokens than it sent, in 1 of 1 answers."
    ]


def test_chunks_are_emitted_as_they_arrive_and_requests_run_side_by_side(fake_server, connect, play):
    """The second answer ends while the first one waits."""
    slow = play([chunk([1]), (0.3, chunk([2], reason="stop")[1]), DONE])
    quick = play([chunk([3], reason="stop"), DONE])
    server = fake_server(slow, quick, quick)
    order = []
    engine = connect(server)
    engine.generate([request("a"), request("b"), request("c")], lambda _, ids: order.extend(ids))
    assert sorted(order[:3]) == [1, 3, 3]
    assert order[3:] == [2]


def test_a_connection_is_kept_for_the_next_request(fake_server, connect, answer, monkeypatch):
    monkeypatch.setattr("skote.engines.endpoint_client._CLOSE_S", WAIT_S)  # however busy the machine is
    server = fake_server(answer)
    engine = connect(server)
    for _ in range(3):
        generate(engine, request())
    assert server.connections == 1


def test_the_key_and_headers_are_sent(fake_server, connect, answer, tmp_path, monkeypatch):
    server = fake_server(answer)
    (tmp_path / "key").write_text("secret\nrest\n", encoding="utf-8")
    generate(connect(server, key_file=str(tmp_path / "key"), headers={"X-Team": "us"}), request())
    assert server.asked[0].headers["Authorization"] == "Bearer secret"
    assert server.asked[0].headers["X-Team"] == "us"
    monkeypatch.setenv("THEIR_KEY", "other")
    generate(connect(server, key_variable="THEIR_KEY"), request())
    assert server.asked[1].headers["Authorization"] == "Bearer other"


@pytest.mark.parametrize(
    ("parts", "options", "sentence"),
    [
        ([(0.0, b'{"error": {"message": "The queue is full."}}')], {"status": 429}, "HTTP 429: The queue is full."),
        ([(0.0, b"moved")], {"status": 302}, "HTTP 302: moved."),
        ([(0.0, b"{}")], {"content_type": "application/json"}, "with application/json, and not with a stream"),
        ([chunk([5])], {"cut": True}, "The connection broke after 1 tokens: "),
        ([chunk([5])], {}, "The stream ended after 1 tokens, and did not say why."),
        ([chunk([5]), DONE], {}, "The stream ended after 1 tokens, and did not say why."),
        ([chunk([], text="", reason="stop"), DONE], {}, "ended the answer without a token"),
        ([chunk([5]), (0.0, {"error": {"message": "no memory"}})], {}, "The server broke off: no memory."),
        ([(0.0, b"data: {\n\n")], {}, "no chunk of an answer: '{'"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_is_not_tried_again(fake_server, connect, play, parts, options, sentence):
    server = fake_server(play(parts, **options))
    engine = connect(server)
    with pytest.raises(EngineError) as failed:
        generate(engine, request())
    assert sentence in str(failed.value)
    assert len(server.asked) == 1
    server.plays = [play([chunk([5], reason="stop"), DONE])]
    assert generate(engine, request()) == (["stop"], [[[5]]])  # the next one is served


def test_a_silent_server_is_given_up(fake_server, connect, play):
    server = fake_server(play([chunk([5]), (0.4, b": awake\n\n")]))
    with pytest.raises(EngineError, match=r"silent for 0.1 s after 1 tokens"):
        generate(connect(server, silence_s=0.1), request())


def test_an_emit_that_raises_leaves_the_server(fake_server, connect, answer):
    """So a worker leaves a request that nobody waits for."""

    def emit(row, ids):
        raise KeyError(row)

    engine = connect(fake_server(answer))
    with pytest.raises(KeyError):
        engine.generate([request()], emit)
    assert generate(engine, request())[0] == ["length"]


def test_a_server_that_refuses_the_key(fake_server):
    with pytest.raises(EngineError, match=r"/v1/models answers with HTTP 401: no key\."):
        EndpointEngine(url=fake_server(models_status=401).url)


def test_a_server_of_many_models_needs_a_name(fake_server):
    with pytest.raises(UsageError, match=r"lists 2 models \(a, b\): give endpoint.model"):
        EndpointEngine(url=fake_server(models=("a", "b")).url)


def test_nobody_answers(free_port):
    with pytest.raises(EngineError, match=r"Nothing answers at .*: start a server there, or give endpoint.command"):
        EndpointEngine(url=f"http://127.0.0.1:{free_port}/v1")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"url": "localhost:8000"}, "must begin with http"),
        ({"url": "http://127.0.0.1:70000/v1"}, "has a port that is none"),
        ({"url": "http://127.0.0.1:0/v1"}, "port 0 is a free one, for a server that endpoint.command starts"),
        ({"url": "http://192.0.2.1:0/v1", "command": "true"}, "has no free port"),
        ({"api": "responses"}, "endpoint.api=responses is not known; choose one of completions, chat"),
        ({"prompt": "tokens"}, "endpoint.prompt=tokens is not known; choose one of ids, text"),
        ({"prompt": "text"}, "needs the model's tokenizer"),
        ({"silence_s": 0}, "must be above 0 s"),
        ({"key_file": "nowhere"}, "endpoint.key_file=nowhere cannot be read"),
        ({"key_variable": "NO_SUCH_KEY"}, "has no such variable"),
        ({"key_file": "a", "key_variable": "b"}, "give one"),
        ({"ca_file": "nowhere"}, "endpoint.ca_file=nowhere cannot be used"),
        ({"command": []}, "endpoint.command is empty"),
        ({"command": "'"}, "cannot be split"),
        ({"command": "no-such-program --port 1"}, "no-such-program cannot be started"),
    ],
)
def test_options_that_are_wrong(free_port, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        EndpointEngine(**{"url": f"http://127.0.0.1:{free_port}/v1"} | options)


SERVER = """
import json, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    asked = 0
    def log_message(self, *_): pass
    def do_GET(self):
        Handler.asked += 1
        content = json.dumps({"data": [{"id": "own"}]}).encode()
        self.send_response(503 if Handler.asked < 3 else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

if sys.argv[2:] == ["stubborn"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_command_is_started_waited_for_and_ended(free_port):
    engine = EndpointEngine(url=f"http://127.0.0.1:{free_port}/v1", command=[sys.executable, "-c", SERVER, free_port])
    assert engine.describe()["tier_reason"].startswith("own at ")
    (server,) = [each for each in psutil.Process().children() if str(free_port) in each.cmdline()]
    with pytest.raises(UsageError, match=r"Something answers at .* before endpoint.command was started"):
        EndpointEngine(url=f"http://127.0.0.1:{free_port}/v1", command=["true"])
    del engine
    gc.collect()
    assert not psutil.pid_exists(server.pid)


def test_a_command_names_what_the_run_has(free_port, tmp_path):
    """The program writes its arguments down and ends."""
    url, seen = f"http://127.0.0.1:{free_port}/v1", tmp_path / "seen"
    writer = f"import sys; open({str(seen)!r}, 'w').write(' '.join(sys.argv[1:]))"
    command = ["{python}", "-c", writer, "{model}:{port}", "--device={device}", "{dtype}", '{"own": 1}']
    with pytest.raises(EngineError, match="ended with exit code 0"):
        EndpointEngine(url=url, command=command, local_dir="/the/model", device="cuda:1", dtype="bf16")
    assert seen.read_text() == f'/the/model:{free_port} --device=cuda:1 bfloat16 {{"own": 1}}'


def test_port_0_is_a_free_one(tmp_path):
    command = [sys.executable, "-c", SERVER, "{port}"]
    engines = [EndpointEngine(url="http://127.0.0.1:0/v1", command=command) for _ in range(2)]
    urls = {engine.describe()["tier_reason"] for engine in engines}
    assert len(urls) == 2
    assert not any(":0/" in url for url in urls)
    del engines
    gc.collect()


@pytest.mark.parametrize("cut", [{"random_seed": 0}, {"layers": 2}])
def test_a_command_cannot_name_a_model_that_no_directory_holds(free_port, cut):
    with pytest.raises(UsageError, match=r"names \{model\}, a checkpoint, and this run's model has random weights"):
        EndpointEngine(url=f"http://127.0.0.1:{free_port}/v1", command="serve {model}", local_dir="shape", **cut)


def test_a_command_that_ends_before_it_answers(free_port):
    line = f"{sys.executable} -c 'raise SystemExit(3)'"
    with pytest.raises(EngineError, match=r"ended with exit code 3; the arm's log has what it said"):
        EndpointEngine(url=f"http://127.0.0.1:{free_port}/v1", command=line)


def test_a_command_that_never_answers_is_given_up_and_ended(free_port):
    sleeper = [sys.executable, "-c", "import signal; signal.pause()", str(free_port)]
    with pytest.raises(EngineError, match=r"does not answer at .* after 0.2 s"):
        EndpointEngine(url=f"http://127.0.0.1:{free_port}/v1", command=sleeper, ready_s=0.2)
    assert [each for each in psutil.Process().children() if str(free_port) in each.cmdline()] == []


def test_a_replica_whose_server_fails_says_so_in_the_row_and_takes_its_own_server_along(
    fake_server, answer, play, free_port
):
    """Killed in any way, the replica leaves no server behind."""
    full = play([(0.0, b'{"error": "full"}')], status=503)
    cached = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    warm = play([chunk([5], reason="stop"), (0.0, {"choices": [], "usage": cached}), DONE])
    server = fake_server(answer, full, warm)
    own = f"{sys.executable} -c 'import signal; signal.pause()' {free_port}"
    with Replica(
        EngineSpec("skote.engines.endpoint.EndpointEngine", {"url": server.url}), index=0, device="cpu"
    ) as replica:
        rows = [replica.generate([request()]).result(WAIT_S)[0] for _ in range(3)]
    assert [row.status for row in rows] == ["ok", "error", "ok"]
    assert rows[1].error == "The server answered with HTTP 503: full."
    assert [chunk.n_tokens for chunk in rows[0].chunks] == [1, 2]
    assert [row.cached_tokens for row in rows] == [None, None, 2]

    options = {"url": f"http://127.0.0.1:{free_port}/v1", "command": own}
    replica = Replica(EngineSpec("skote.engines.endpoint.EndpointEngine", options), index=0, device="cpu")
    started = psutil.Process(replica.pid)
    while not (servers := [each for each in started.children() if str(free_port) in each.cmdline()]):
        assert started.is_running()
    started.kill()
    with pytest.raises(ReplicaError, match="SIGKILL"):
        replica.wait_ready(WAIT_S)
    replica.close()
    assert psutil.wait_procs(servers, timeout=WAIT_S)[1] == []


def test_requests_join_and_leave_while_others_run(fake_server, play):
    """The first answer takes as long as all others; one is cancelled in a silence, and its place is free at once."""
    slow = play([chunk([1]), (0.5, chunk([2], reason="stop")[1]), DONE])
    silent = play([chunk([3]), (WAIT_S, b": over\n\n")])
    quick = play([chunk([4], reason="stop"), DONE])
    server = fake_server(slow, silent, quick)
    target = EngineSpec("skote.engines.endpoint.EndpointEngine", {"url": server.url})
    with Replica(target, index=0, device="cpu") as replica:
        replica.wait_ready(WAIT_S)
        launches = []
        for name in "ab":
            heard = threading.Event()
            launches.append(replica.generate([request(name)], lambda row, ids, heard=heard: heard.set()))
            assert heard.wait(WAIT_S)
        (third,) = replica.generate([request("c")]).result(WAIT_S)
        assert (third.status, third.output_ids) == ("ok", (4,))
        assert not launches[0].done()
        replica.cancel(launches[1], 0)
        (second,) = launches[1].result(WAIT_S)
        (first,) = launches[0].result(WAIT_S)
    assert (second.status, second.output_ids) == ("cancelled", (3,))
    assert (first.status, first.output_ids) == ("ok", (1, 2))
    assert third.end_ns < first.end_ns
