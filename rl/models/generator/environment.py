"""What the process of a generator needs in its environment before it starts."""

import torch


def generator_environment(
    num_threads: int, compile: bool = False, dtype: str = "float32", on_gpu: bool | None = None
) -> dict[str, str]:
    """on_gpu: None: where this host has one."""
    helpers_alone = not compile and not (torch.accelerator.is_available() if on_gpu is None else on_gpu)
    # Triton's matrix products in fp32 are tf32 by default, 10 bits of mantissa, vLLM's attention among them.
    exact = {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}
    return exact | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: less memory, faster start
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1" if helpers_alone else "0",  # else 10 s of g++ at the first token
        "OMP_NUM_THREADS": str(num_threads),
        "MALLOC_ARENA_MAX": "1",  # else what one thread frees is not there for another: a copy of the weights
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # Compiled at the start, by nvcc, and then used for requests without a seed alone: ours all have one.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
