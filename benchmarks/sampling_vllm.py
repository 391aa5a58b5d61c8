"""The vLLM column of sampling.py, run by an interpreter with vLLM. Reads a task (JSON) on stdin, prints the rate."""

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
        max_loras=len(task["adapters"]),
        max_lora_rank=task["rank"],
        max_num_seqs=max(64, len(task["prompts"])),
        max_model_len=512,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**30,  # enough for all requests; vLLM's default share of the memory may not be free
        disable_log_stats=True,
    )
    adapters = [LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(task["adapters"])]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in task["prompts"]]
    lora = [adapters[number % len(adapters)] for number in range(len(prompts))]

    def generate(tokens: int) -> float:
        params = [
            SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True, logprobs=0)
            for number in range(len(prompts))
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return time.perf_counter() - started

    generate(4)
    seconds = statistics.median(generate(task["tokens"]) for _ in range(task["repeats"]))
    print(json.dumps({"tokens_per_second": len(prompts) * task["tokens"] / seconds}))


if __name__ == "__main__":
    main()
