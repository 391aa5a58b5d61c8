"""Train conversations with the cookbook's renderers and the tinker SDK, and sample them back.

A program for the cookbook's environment: it reads JSON from its input, and writes JSON to its output.
"""

import json
import sys

import tinker
from tinker_cookbook.renderers import Message, Renderer, ToolCall, TrainOnWhat, get_renderer
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.supervised.data import conversation_to_datum

STEPS, RANK, LEARNING_RATE, MAX_TOKENS = 25, 16, 1e-2, 96


def message_of(given: dict) -> Message:
    calls = [
        ToolCall(function=ToolCall.FunctionBody(name=call["name"], arguments=json.dumps(call["arguments"])))
        for call in given.get("tool_calls", [])
    ]
    return {**given, **({"tool_calls": calls} if calls else {})}


def parsed(renderer: Renderer, tokens: list[int]) -> dict:
    message, termination = renderer.parse_response(tokens)
    return {"message": renderer.to_openai_message(message), "termination": str(termination)}


def converse(service: tinker.ServiceClient, model: str, name: str, conversations: list[list[dict]]) -> dict:
    training = service.create_lora_training_client(base_model=model, rank=RANK, seed=1)
    renderer = get_renderer(name, training.get_tokenizer())
    rows = [[message_of(each) for each in conversation] for conversation in conversations]
    data = [conversation_to_datum(row, renderer, 512, TrainOnWhat.LAST_ASSISTANT_MESSAGE) for row in rows]
    weights = [datum.loss_fn_inputs["weights"] for datum in data]
    losses = []
    for _ in range(STEPS):
        passed = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()
        losses.append(compute_mean_nll([each["logprobs"] for each in passed.result().loss_fn_outputs], weights))

    path = training.save_weights_for_sampler("renderers").result().path
    sampler = training.create_sampling_client(path)
    ends = renderer.get_stop_sequences()
    params = tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop=ends)
    prompts = [renderer.build_generation_prompt(row[:-1]) for row in rows]
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    told = []
    for prompt, datum, weight, future in zip(prompts, data, weights, futures, strict=True):
        example = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])]
        sampled = future.result().sequences[0].tokens
        forced = example[prompt.length :]
        told.append(
            {
                "prompt": prompt.to_ints(),
                "example": example,
                "trained": [float(each) > 0 for each in weight.data],
                "sampled": sampled,
                "from_example": parsed(renderer, forced),
                "from_sample": parsed(renderer, sampled),
            }
        )
    same = sampler.get_tokenizer().get_vocab() == training.get_tokenizer().get_vocab()
    return {"path": path, "losses": losses, "ends": ends, "same_tokenizer": same, "rows": told}


def main() -> None:
    given = json.load(sys.stdin)
    service = tinker.ServiceClient(base_url=given["url"], api_key=given["key"])
    print(json.dumps({model: converse(service, model, **options) for model, options in given["models"].items()}))


if __name__ == "__main__":
    main()
