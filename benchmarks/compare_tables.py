"""The tables of compare_h200.py, as Markdown for docs/performance.md."""

from collections.abc import Iterable, Sequence
from typing import Any

Entry = dict[str, Any]


def markdown(report: dict[str, Any]) -> str:
    """Return the page of a report. Parts that did not run are left out; failed parts are listed at the end."""
    parts: dict[str, list[Entry]] = report["parts"]
    sections = [_machine(parts)]
    for entry in _with_result(parts, "overhead"):
        sections.append(_overhead(entry["result"]))
    sections += [_training(_with_result(parts, "training")), _rollouts(_with_result(parts, "rollouts"))]
    sections += _sampling(parts)
    for entry in _with_result(parts, "lora-cost"):
        sections.append(_lora_cost(entry["result"]))
    sections.append(_failures(parts))
    return "\n\n".join(filter(None, sections)) + "\n"


def _with_result(parts: dict[str, list[Entry]], part: str) -> list[Entry]:
    return [entry for entry in parts.get(part, []) if entry["result"]]


def _machine(parts: dict[str, list[Entry]]) -> str:
    """Return one line for each combination of machine and versions that the parts report; normally there is one."""
    lines: dict[str, None] = {}
    for entries in parts.values():
        for entry in entries:
            found = (entry["result"] or {}).get("machine")
            if found and "host" in found:
                cuda = f" (CUDA {found['cuda']})" if found["cuda"] else ""
                host = f"{found['host']} with {found['cores']} cores"
                versions = (
                    f"torch {found['torch']}{cuda}, transformers {found['transformers']}, Python {found['python']}"
                )
                lines[f"{found['device']}, host {host}, {versions}."] = None
    return "\n".join(lines)


def _overhead(result: Entry) -> str:
    def name(row: Entry) -> str:
        tenants = f"{row['count']} tenant" + ("s" if row["count"] > 1 else "")
        each = result["seqs"] * result["length"]
        return {
            "train": f"train {tenants} × {result['seqs']} × {result['length']}",
            "step": f"train {result['seqs']} × {result['length']} + optim_step"
            if row["tokens"] == each
            else f"train {row['tokens']} tokens + optim_step",
            "prompts": f"first token after {row['count']} × {result['prompt']} prompt tokens",
            "decode": f"{row['count']} sequences × {result['tokens']} tokens",
        }[row["kind"]]

    rows = [
        (
            name(row),
            _ms(row["wall_ms"]),
            _ms(row.get("gpu_ms")),
            _ratio(row["wall_ms"], row.get("gpu_ms")),
            _number(row.get("kernels")),
            _number(row["tokens_per_s"]),
        )
        for row in result["rows"]
    ]
    title = f"Passes of {result['model']}, rank {result['rank']}, {result['dtype']}, medians of {result['repeats']}:"
    return f"{title}\n\n{_table(('pass', 'wall', 'GPU', 'wall over GPU', 'kernels', 'tokens/s'), rows)}"


def _training(entries: Sequence[Entry]) -> str:
    if not entries:
        return ""
    rows = []
    for entry in entries:
        fused, ideal, alone = (entry["result"]["columns"][name] for name in ("fused", "ideal", "alone"))
        rows.append(
            (
                f"{entry['model']}, {entry['case']}",
                _ms(1000 * fused["forward_backward_s"]),
                _ms(1000 * fused["seconds"]),
                _ms(1000 * ideal["seconds"]),
                f"{entry['result']['fused_over_ideal']:.3f}",
                _ms(1000 * alone["seconds"]),
                "" if fused["peak_gib"] is None else f"{fused['peak_gib']:.1f} GiB",
            )
        )
    head = (
        "model, tenants × sequences × tokens",
        "fused fwd+bwd",
        "fused step",
        "ideal step",
        "fused over ideal",
        "step of a tenant alone",
        "peak",
    )
    return f"Training:\n\n{_table(head, rows)}"


def _rollouts(entries: Sequence[Entry]) -> str:
    if not entries:
        return ""
    rows = []
    for entry in entries:
        result = entry["result"]
        given, server = result["arguments"], result["server"]
        busy, lone = result["gateway_busy_ms"], result.get("lone_step_ms")
        rows.append(
            (
                f"{entry['model']}, {entry['case']}",
                _number(result["training_tokens_per_s"]),
                _number(result["sampled_tokens_per_s"]),
                f"{result['seconds']:.1f} s",
                f"{server['training_seconds']:.1f} and {server['sampling_seconds']:.1f} s",
                _number(server["batches"]),
                _ratio(given["tenants"] * given["steps"], server["batches"]),
                f"{result['publish_to_samples_s']['median']:.2f} s",
                f"{busy['p50']:.1f} and {busy['p99']:.1f} ms",
                "" if lone is None else _ms(lone["median"]),
            )
        )
    head = ("tenants", "trained tokens/s", "sampled tokens/s", "time", "device trains and samples", "training batches")
    head += ("merge ratio", "publish to samples", "`healthz` p50 and p99", "step of a tenant alone")
    return f"Through the server:\n\n{_table(head, rows)}"


def _sampling(parts: dict[str, list[Entry]]) -> Iterable[str]:
    """Yield a table of rates for each model, then one of the times to publish."""
    engines = ("torch-sampler", "vllm-sampler", "vllm")
    found = {(part, entry["model"]): entry["result"] for part in engines for entry in _with_result(parts, part)}
    for model in dict.fromkeys(model for _, model in found):
        rows_of = {
            part: {row["requests"]: row for row in found.get((part, model), {}).get("rows", [])} for part in engines
        }
        rows = []
        for requests in sorted({each for rows in rows_of.values() for each in rows}):
            ours, own_vllm, vllm = (rows_of[part].get(requests, {}) for part in engines)
            rate = [each.get("tokens_per_s") for each in (ours, own_vllm, vllm)]
            more = (_number(vllm.get("plain")), _number(vllm.get("seeded")))
            ratios = (_ratio(rate[0], rate[2]), _ratio(rate[1], rate[2]))
            rows.append((_number(requests), *map(_number, rate), *ratios, *more))
        head = ("requests", "torch sampler", "our vLLM sampler", "vLLM", "torch sampler over vLLM")
        head += ("our vLLM sampler over vLLM", "vLLM without log-probabilities", "vLLM with seeds")
        any_result = next(result for (_, name), result in found.items() if name == model)
        title = (
            f"Sampling from {model}, {any_result['adapters']} adapters of rank {any_result['rank']}, "
            f"{any_result['tokens']} tokens a request, tokens/s, medians of {any_result['repeats']}:"
        )
        yield f"{title}\n\n{_table(head, rows)}"
    published = [
        (
            f"{model}, {part}",
            _ms(result["publish"]["published_ms"]),
            _ms(result["publish"]["known_ms"]),
            _ms(result["publish"]["latency_ms"]),
            _ms(result["publish"].get("call_ms")),
        )
        for (part, model), result in found.items()
        if "publish" in result
    ]
    if published:
        head = ("", "publish to first token", "the same request, known version", "difference", "the call of publish")
        yield f"Publishing:\n\n{_table(head, published)}"


def _lora_cost(result: Entry) -> str:
    rates = [
        (_number(row["requests"]), _number(row["lora"]), _number(row["base"]), f"{row['lora_over_base']:.3f}")
        for row in result["rows"]
    ]
    steps = [
        (_number(row["sequences"]), _ms(row["lora_ms"]), _ms(row["base_ms"]), f"{row['lora_over_base']:.3f}")
        for row in result.get("decode_steps", [])
    ]
    head = ("with adapters", "base model", "with adapters over base")
    text = (
        f"The cost of LoRA in the torch sampler, {result['model']}, tokens/s:\n\n{_table(('requests', *head), rates)}"
    )
    if steps:
        title = f"A decode step of {result['model']}, prompts of {result['prompt']} tokens:"
        text += f"\n\n{title}\n\n{_table(('sequences', *head), steps)}"
    return text


def _failures(parts: dict[str, list[Entry]]) -> str:
    return "\n".join(
        f"- {part} {entry['model']} {entry['case']}".rstrip() + f" failed: {entry['error']}"
        for part, entries in parts.items()
        for entry in entries
        if entry["error"]
    )


# --- cells ------------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _number(value: float | None) -> str:
    """Return a whole number with a space between thousands; nothing for None."""
    return "" if value is None else f"{value:,.0f}".replace(",", " ")


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value is not None and other else ""
