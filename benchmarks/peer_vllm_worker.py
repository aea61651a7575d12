"""One vLLM engine of `benchmarks.peer_vllm`: boot, wait to be told to go, measure, write what was seen.

Runs in vLLM's own environment and imports nothing of this project.

    python peer_vllm_worker.py JOB.json
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

Job = dict[str, Any]
_MAX_MODEL_LEN = 2048


def main() -> None:
    path = Path(sys.argv[1])
    job: Job = json.loads(path.read_text())
    if job["runner"] is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = job["runner"]
    begin = time.perf_counter()
    import vllm

    llm = vllm.LLM(**engine_arguments(job))
    result = {"vllm": vllm.__version__, "boot_seconds": round(time.perf_counter() - begin, 1), "windows": {}}
    path.with_suffix(".ready").touch()
    while not path.with_suffix(".go").exists():
        time.sleep(0.05)
    for concurrency, prompts in job["batches"].items():
        _answer(llm, job, prompts, 48)
        _answer(llm, job, prompts, 160)  # past every size of batch and of context that compiles something
        windows = [_answer(llm, job, prompts, job["output_tokens"]) for _ in range(job["repeats"])]
        result["windows"][concurrency] = windows
        _write(path, result)
    for concurrency in map(str, job["profile"]):
        llm.start_profile()
        seen = _answer(llm, job, job["batches"][concurrency], 64)
        llm.stop_profile()
        result.setdefault("profiled", {})[concurrency] = seen
        _write(path, result)
    path.with_suffix(".done").touch()


def engine_arguments(job: Job) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`: graphs of exactly the sizes that are measured, everything else its own choice."""
    drafts, rows = job["num_drafts"], job["num_drafts"] + 1
    sizes = {1, 2, 4, 8, 16, 32, 64} | set(map(int, job["batches"]))
    per_request = {1, rows, 2 * drafts or 1} if job["parallel"] else {1, rows}
    captured = sorted({size * count for size in sizes for count in per_request})
    arguments: dict[str, Any] = {
        "model": job["target"],
        "dtype": "bfloat16",
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": max(sizes),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.12,  # only the check at start looks at it: the cache's size is given
        "kv_cache_memory_bytes": job["kv_bytes"],
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "disable_log_stats": False,  # its counters say what was accepted
        "seed": 0,
        "generation_config": "vllm",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "compilation_config": {"cudagraph_capture_sizes": captured, "max_cudagraph_capture_size": captured[-1]},
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": job["traces"],
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
        },
    }
    if job["draft"] is not None:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": job["draft"],
            "num_speculative_tokens": drafts,
            "parallel_drafting": job["parallel"],
            "draft_load_config": {"load_format": "safetensors"},
        }
        if job["rates"] is not None:
            arguments["speculative_config"] |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": job["rates"],
            }
    return arguments


def _answer(llm: Any, job: Job, prompts: list[list[int]], tokens: int) -> dict[str, float | int]:
    """Answer a batch; what was seen between the `settle`-th token of the last request and the first end of one."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    engine, count = llm.llm_engine, {}
    before = _counters(llm)
    for i, prompt in enumerate(prompts):
        name = f"{time.monotonic_ns()}-{i}"
        count[name] = 0
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    begin = end = None
    finished = False
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            count[output.request_id] += len(output.outputs[0].token_ids)
            finished |= output.finished
        mark = (now, sum(count.values()))
        if begin is None and min(count.values()) >= job["settle"]:
            begin = mark
        if not finished:
            end = mark
    after = _counters(llm)
    rounds = after["drafts"] - before["drafts"]
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    seen = {"requests": len(prompts), "rounds": rounds, "accepted": accepted, "tokens": 0, "seconds": 0.0}
    if begin is not None and end is not None and end[0] > begin[0]:
        seen |= {"seconds": end[0] - begin[0], "tokens": end[1] - begin[1], "first_token": begin[1]}
    return seen | {"all_tokens": sum(count.values()), "prompt_tokens": sum(map(len, prompts))}


def _counters(llm: Any) -> dict[str, float]:
    """Draft rounds and accepted drafts so far, of all requests together."""
    found = {"drafts": 0.0, "accepted_tokens": 0.0}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in found and metric.name != name:
            found[name] = metric.value
    return found


def _write(path: Path, result: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(path.with_suffix(".result"))


if __name__ == "__main__":
    main()
