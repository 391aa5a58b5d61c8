"""vLLM itself, for sampling.py and vllm_sampler.py; run by an interpreter with vLLM.

Reads a task (JSON) on stdin, and prints the tokens per second for each number of simultaneous requests.
"""

import json
import statistics
import sys
import time

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest


def main() -> None:
    task = json.load(sys.stdin)
    llm = LLM(
        model=task["model"],
        dtype=task["dtype"],
        enable_lora=True,
        disable_log_stats=True,
        **task["engine_args"],
    )
    adapters = [LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(task["adapters"])]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in task["prompts"]]
    lora = [adapters[number % len(adapters)] for number in range(len(prompts))]

    def generate(count: int, tokens: int) -> float:
        params = [
            SamplingParams(
                temperature=1.0,
                seed=number if task["seeded"] else None,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for number in range(count)
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts[:count], params, lora_request=lora[:count], use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return time.perf_counter() - started

    rates = []
    for count in task["requests"]:
        generate(count, 4)
        seconds = statistics.median(generate(count, task["tokens"]) for _ in range(task["repeats"]))
        rates.append(count * task["tokens"] / seconds)
    print(json.dumps({"rates": rates}))


if __name__ == "__main__":
    main()
