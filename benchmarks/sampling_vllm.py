"""vLLM by itself, for sampling.py and sampler_rates.py. It needs an interpreter with vLLM.

As a program, it measures the vLLM column of sampling.py: it reads a task (JSON) on stdin and prints the rates as the
last line of stdout that starts with ``{"tokens_per_second"``.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

# What a request asks vLLM for. Our samplers always return the log-probability of each token, and draw each request's
# tokens from a seed. Seeds are slow in vLLM, which then draws for one request after another.
VARIANTS: Mapping[str, Mapping[str, int]] = {
    "logprobs": {"logprobs": 0},  # 0: of the drawn token only
    "plain": {},
    "seeded": {"logprobs": 0, "seed": 0},
}


class PlainVllm:
    """vLLM's own engine with LoRA adapters, alone on the device."""

    def __init__(
        self,
        model: str,
        adapters: Sequence[str],
        *,
        rank: int,
        dtype: str,
        cuda: bool,
        random_weights: bool,
        max_requests: int,
    ) -> None:
        """Start the engine.

        model, adapters: folders. random_weights: the model's folder has no weights, so vLLM draws some.
        """
        # The cache gets most of the GPU; on a CPU the default share of the memory may not be free.
        memory = {"gpu_memory_utilization": 0.85} if cuda else {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
        self._llm = LLM(
            model=model,
            dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
            load_format="dummy" if random_weights else "auto",
            enable_lora=True,
            max_loras=len(adapters),
            max_lora_rank=rank,
            max_num_seqs=max(64, max_requests),
            max_model_len=1024,
            enable_prefix_caching=False,  # every prompt is used once
            disable_log_stats=True,
            **memory,
        )
        self._adapters = [LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(adapters)]
        self._published = len(adapters)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, variant: str = "logprobs") -> None:
        """Draw exactly ``tokens`` tokens for each prompt, at temperature 1, with the adapters in turn."""
        options = VARIANTS[variant]
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                **(options | {"seed": number} if "seed" in options else options),
            )
            for number in range(len(prompts))
        ]
        lora = [self._adapters[number % len(self._adapters)] for number in range(len(prompts))]
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        outputs = self._llm.generate(inputs, params, lora_request=lora, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs), "a request ended early"

    def first_token(self, prompt: Sequence[int], *, new: bool) -> float:
        """Return the seconds to the first token of a request, with an adapter that vLLM has or has not loaded."""
        lora = self._adapters[0]
        if new:
            self._published += 1
            lora = LoRARequest(f"new-{self._published}", self._published, lora.lora_path)
        params = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0)
        started = time.perf_counter()
        self._llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], [params], lora_request=[lora], use_tqdm=False)
        return time.perf_counter() - started


def main() -> None:
    task = json.load(sys.stdin)
    engine = PlainVllm(
        task["model"],
        task["adapters"],
        rank=task["rank"],
        dtype=task["dtype"],
        cuda=task["cuda"],
        random_weights=task["random_weights"],
        max_requests=max(task["requests"]),
    )
    rates = []
    for count in task["requests"]:
        prompts = task["prompts"][:count]
        engine.generate(prompts, 4, "seeded")
        seconds = []
        for _ in range(task["repeats"]):
            started = time.perf_counter()
            engine.generate(prompts, task["tokens"], "seeded")
            seconds.append(time.perf_counter() - started)
        rates.append(count * task["tokens"] / statistics.median(seconds))
    print(json.dumps({"tokens_per_second": rates}), flush=True)


if __name__ == "__main__":
    main()
