"""A stand-in for `sglang.launch_server` that answers at once: what the A/B's own machinery is tested against.

Its answers are a function of the prompt alone, plus `FAKE_SHIFT` on every logprob of an expanded path. It logs the
prefill line of the path it was started for, or `FAKE_PIPELINE`, and names `FAKE_MODEL` as its model. With
`FAKE_CHILD_PID_FILE` it has a child that ignores SIGTERM. `FAKE_DROP=1` leaves the last prompt out; `FAKE_SLEEP_S`
delays each answer; `FAKE_CRASH=1` ends it at its start. `FAKE_CONTEXT` is the longest prompt of a benchmark that it
does not reject, as SGLang does: with HTTP 400, or in a stream of HTTP 200.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NUM_RANKS = 2
_EXPANDED = os.environ.get("SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND") == "1"
_SUM = re.compile(r"What is (\d+) plus (\d+)\?")


def logprob(prompt: list[int], position: int) -> float:
    """Between -2 and -1."""
    return -1.0 - (sum(prompt) * 31 + position * 17) % 97 / 97


def answer_tokens(prompt: list[int], new_tokens: int) -> dict:
    shift = float(os.environ.get("FAKE_SHIFT", "0")) if _EXPANDED else 0.0
    tokens = [(sum(prompt) + step) % 500 for step in range(new_tokens)]
    values = [logprob(prompt, position) + shift for position in range(len(prompt) + new_tokens)]
    output = [[values[len(prompt) + step], token, None] for step, token in enumerate(tokens)]
    return {
        "text": "",
        "meta_info": {
            "input_token_logprobs": [[None, prompt[0], None]]
            + [[values[index], prompt[index], None] for index in range(1, len(prompt))],
            "output_token_logprobs": output,
            "output_top_logprobs": [[entry, [entry[0] - 1.0, 0, None]] for entry in output],
        },
    }


def answer_text(text: str) -> dict:
    """The sum of the last question, wrong for sums above FAKE_LARGEST_SUM."""
    first, second = map(int, _SUM.findall(text)[-1])
    total = first + second
    if total > int(os.environ.get("FAKE_LARGEST_SUM", "1000000")):
        total += 1
    return {"text": f" It is {total}.", "meta_info": {"completion_tokens": 4, "prompt_tokens": len(text)}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        model = os.environ.get("FAKE_MODEL", "fake")
        if self.path == "/v1/models":
            self._send({"data": [{"id": model}]})
        else:
            self._send({"model_path": model, "is_generation": True})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        new_tokens = body.get("sampling_params", {}).get("max_new_tokens", 0)
        time.sleep(float(os.environ.get("FAKE_SLEEP_S", "0")))
        if isinstance(body.get("input_ids", [None])[0], int):
            self._answer_one(body["input_ids"], body.get("stream", False))
        elif "input_ids" in body:
            prompts = body["input_ids"][: -1 if os.environ.get("FAKE_DROP") else None]
            self._send([answer_tokens(prompt, new_tokens) for prompt in prompts])
        elif new_tokens and "text" in body:
            self._send(answer_text(body["text"]))
        else:
            self._send({"text": "", "meta_info": {}})

    def _answer_one(self, prompt: list[int], stream: bool) -> None:
        """One token; every other prompt's has no text, as special tokens have none."""
        text = "4" if sum(prompt) % 2 else ""
        answer = {"text": text, "meta_info": {"completion_tokens": 1, "prompt_tokens": len(prompt)}}
        rejected = len(prompt) > int(os.environ.get("FAKE_CONTEXT", "1000000"))
        if rejected:
            answer = {"error": {"message": f"The input ({len(prompt)} tokens) is too long", "code": 400}}
        if stream:
            self._send_bytes(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())
        else:
            self._send(answer, status=400 if rejected else 200)

    def _send(self, document: object, status: int = 200) -> None:
        self._send_bytes(json.dumps(document).encode(), status)

    def _send_bytes(self, payload: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args) -> None:
        pass


def log_prefill() -> None:
    pipeline = os.environ.get("FAKE_PIPELINE")
    if pipeline is None:
        psum = os.environ.get("SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE") == "1"
        pipeline = ("psum" if psum else "labels") if _EXPANDED else "non-expanded"
    for rank in range(NUM_RANKS):
        print(
            f"[2026-01-01 00:00:00 TP{rank} EP{rank}] DeepEP v2 prefill: pipeline={pipeline} sync=cpu "
            "transport=reference dtype=fp8 reason=because; sync: off",
            flush=True,
        )


def start_stubborn_child() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    with open(os.environ["FAKE_CHILD_PID_FILE"], "a") as stream:
        stream.write(f"{child.pid}\n")


if __name__ == "__main__":
    if os.environ.get("FAKE_CRASH"):
        sys.exit("RuntimeError: no weights here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if "FAKE_CHILD_PID_FILE" in os.environ:
        start_stubborn_child()
    log_prefill()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
