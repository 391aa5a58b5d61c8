"""Start-up time of a server after many answered forward passes, compared with an empty server in the same run.

An evaluation loop between two steps leaves thousands of forward passes in the journal after the last snapshot. They are
answered and changed nothing, so they should not slow down a start: the goal is less than twice the time of an empty
start.

The server (mock model) is killed with SIGKILL and takes no snapshots. Empty and full starts take turns.

    python benchmarks/restart_time.py --passes 10000 --starts 5 --json build/bench/restart_time.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from twinkle.server.wire import tinker_pb2 as pb
from twinkle.utils.network import find_free_port

KEY = {"x-api-key": "tml-benchmark"}
TOKENS = 64
_NO_SNAPSHOTS = """
import sys
from twinkle.server.cli import main
from twinkle.server.config.timings import Timings
sys.exit(main(sys.argv[1:], Timings(snapshot=1e9)))
"""


class Server:
    """A mock server with its own data directory that takes no snapshots."""

    def __init__(self, directory: Path) -> None:
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}/api/v1"
        self.config = directory / "config.yaml"
        self.log = directory / "server.log"
        content = {
            "runtime": "embedded",
            "data_dir": str(directory / "data"),
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {"name": "server", "import_path": "server"},
                {"name": "model", "import_path": "model", "args": {"model_id": "mock", "backend": "mock"}},
            ],
        }
        self.config.write_text(json.dumps(content))

    def start(self) -> float:
        """Start the server and return the seconds until it is healthy, which includes the replay."""
        began = time.perf_counter()
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", _NO_SNAPSHOTS, "launch", "-c", str(self.config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        while True:
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text())
            try:
                if httpx.get(f"{self.url}/healthz", timeout=5, trust_env=False).status_code == 200:
                    return time.perf_counter() - began
            except httpx.HTTPError:
                time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def forward_passes(url: str, passes: int) -> None:
    """Submit forward passes from a few threads and fetch all results."""
    with httpx.Client(base_url=url, headers=KEY, timeout=120, trust_env=False) as http:

        def post(path: str, **content: object) -> dict[str, str]:
            answer: dict[str, str] = http.post(path, json=content).raise_for_status().json()
            return answer

        session = post("/create_session", tags=[], type="create_session")["session_id"]
        request = post(
            "/create_model",
            session_id=session,
            model_seq_id=0,
            base_model="mock",
            lora_config={"rank": 8, "seed": 1},
            type="create_model",
        )["request_id"]
        model = post("/retrieve_future", request_id=request, allow_metadata_only=False)["model_id"]
        # No optimizer step: it would be replayed at every start.
        body = pb.ForwardBackwardRequest(model_id=model, loss_fn="cross_entropy", forward_only=True)
        tokens = np.arange(1, TOKENS + 1)
        text = pb.EncodedTextChunk(tokens=tokens.astype("<i4").tobytes())
        targets = pb.Tensor(dense=tokens.astype("<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[TOKENS])
        body.data.append(pb.Datum(model_input=[pb.Chunk(encoded_text=text)], loss_fn_inputs={"target_tokens": targets}))

        def one(seq: int) -> None:
            mine = pb.ForwardBackwardRequest()
            mine.CopyFrom(body)
            mine.seq_id = seq
            headers = {"content-type": "application/x-protobuf"}
            answer = http.post("/forward_backward", content=mine.SerializeToString(), headers=headers)
            sent = answer.raise_for_status().json()["request_id"]
            asked = {"request_id": sent, "allow_metadata_only": False}
            accept = {"Accept": "application/x-protobuf"}  # as the SDK does
            while http.post("/retrieve_future", json=asked, headers=accept).status_code == 408:
                pass

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(1, passes + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"empty": [], "full": []}
    with tempfile.TemporaryDirectory() as directory:
        servers = {}
        for name in times:
            place = Path(directory) / name
            place.mkdir()
            servers[name] = Server(place)
            servers[name].start()
        began = time.perf_counter()
        forward_passes(servers["full"].url, arguments.passes)
        print(f"{arguments.passes} forward passes answered in {time.perf_counter() - began:.1f} s")
        for server in servers.values():
            server.kill()
        for number in range(arguments.starts):
            for name, server in servers.items():
                times[name].append(server.start())
                server.kill()
            if number == 0:
                print(f"first start: empty {times['empty'][0]:.2f} s, full {times['full'][0]:.2f} s")
    medians = {name: statistics.median(each) for name, each in times.items()}
    # Only the first start counts: it covers the passes with a snapshot, so later starts have little to do.
    first = times["full"][0] / medians["empty"]
    print(f"empty start {medians['empty']:.2f} s; first start after the passes {times['full'][0]:.2f} s: {first:.2f} ×")
    print(f"later starts {medians['full']:.2f} s: {medians['full'] / medians['empty']:.2f} ×")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        numbers = {"passes": arguments.passes, "seconds": times, "first_ratio": first}
        arguments.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
