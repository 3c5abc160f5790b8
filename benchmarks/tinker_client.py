"""Clients of any Tinker server, with whichever SDK this Python has (0.24 and 0.38 run it): requests and tokens a second.

For benchmarks/tinker_servers.py. Prints a line of JSON for each kind of work. A training request is a forward_backward
and an optim_step, sent together; a sampling request a snapshot of the weights, and samples from it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tinker
from tinker import types

WARM_ROUNDS = 12  # at most
STEADY = 1.3  # a round that takes so much longer than the shortest has still compiled


def done(answer: Any) -> Any:
    """What older SDKs return themselves, newer ones return a future of."""
    return answer.result() if hasattr(answer, "result") else answer


class Client:
    def __init__(self, service: Any, number: int, options: argparse.Namespace):
        made = service.create_lora_training_client(
            options.model, rank=options.rank, seed=number + 1, train_unembed=False
        )
        self._training, self._options = done(made), options
        self._data = [self._datum(number, i) for i in range(options.data)]
        self._num_sampled = 0

    def _datum(self, number: int, i: int) -> Any:
        length = self._options.length
        ids = [
            100 + (7919 * (number + 1) + 104729 * (i + 1) + 31 * t * t + 17 * t) % 40000
            for t in range(length + 1)
        ]
        inputs = {
            "target_tokens": types.TensorData(data=ids[1:], dtype="int64", shape=[length]),
            "weights": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
        }
        return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    def train(self) -> int:
        learned = self._training.forward_backward(self._data, "cross_entropy")
        stepped = self._training.optim_step(types.AdamParams(learning_rate=1e-4))
        learned.result()
        stepped.result()
        return self._options.data * self._options.length

    def sample(self) -> int:
        sampler = done(self._training.save_weights_and_get_sampling_client())
        self._num_sampled += 1
        params = types.SamplingParams(
            max_tokens=self._options.max_tokens, temperature=1.0, seed=self._num_sampled
        )
        prompt = types.ModelInput.from_ints([300 + 13 * t for t in range(32)])
        asked = sampler.sample(prompt=prompt, num_samples=self._options.samples, sampling_params=params)
        return sum(len(sequence.tokens) for sequence in asked.result().sequences)


def measure(kind: str, works: list[Callable[[], int]], seconds: float) -> dict[str, Any]:
    with ThreadPoolExecutor(len(works)) as threads:

        def round_of(count: int) -> float:
            began = time.perf_counter()
            list(threads.map(lambda work: work(), works[:count]))
            return time.perf_counter() - began

        for count in range(1, len(works)):
            round_of(count)
        rounds: list[float] = []
        while len(rounds) < WARM_ROUNDS and (len(rounds) < 3 or max(rounds[-2:]) > STEADY * min(rounds)):
            rounds.append(round_of(len(works)))
        if max(rounds[-2:]) > STEADY * min(rounds):
            print(f"{kind}: not steady after {WARM_ROUNDS} rounds to warm up", file=sys.stderr)
        began = time.perf_counter()

        def work_on(work: Callable[[], int]) -> list[int]:
            tokens = []
            while time.perf_counter() < began + seconds:
                tokens.append(work())
            return tokens

        each = list(threads.map(work_on, works))
    lasted = time.perf_counter() - began
    requests, tokens = sum(map(len, each)), sum(map(sum, each))
    return {"kind": kind, "requests/s": requests / lasted, "tokens/s": tokens / lasted, "requests": requests}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("url", "api_key", "model"):
        parser.add_argument(f"--{name}", required=True)
    numbers = {
        "clients": 4,
        "data": 4,
        "length": 128,
        "samples": 8,
        "max_tokens": 32,
        "rank": 8,
        "seconds": 30,
    }
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    service = tinker.ServiceClient(base_url=options.url, api_key=options.api_key)
    clients = [Client(service, i, options) for i in range(options.clients)]
    for kind in ("train", "sample"):
        print(json.dumps(measure(kind, [getattr(c, kind) for c in clients], options.seconds)), flush=True)
    print(json.dumps({"kind": "sdk", "version": tinker.__version__}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
