"""What clients name is bounded where it enters: what is small to send may not become large here."""

# holds: exact, counts

import asyncio
import time

import numpy as np
import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")
from tinker.proto import tinker_public_pb2 as pb

from rl.tinker import wire
from rl.tinker.backend import UserError
from rl.tinker.limits import Limits
from rl.tinker.openai_requests import CompletionsRequest
from rl.tinker.openai_stream import PartialText
from rl.tinker.wire_limits import WireLimits
from tests.tinker.lives import LORA, ME, NAME, answered, living, make_model
from tests.tinker.test_quotas import SAMPLE

STOPS = {
    "a long one": ["a" * 257],
    "a long one alone": "a" * 257,
    "many": [f"stop {i}" for i in range(65)],
    "many tokens": [1] * 1025,
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_stops_are_bounded_on_every_route(tmp_path, stop):
    """Generators look for each after each token, and streams for each beginning of each."""

    async def main():
        async with living(tmp_path / "a") as service:
            sampler = service.create_sampler(ME, service.create_session(ME, None, None), 0, NAME, None)
            asked = SAMPLE | {"sampling_params": SAMPLE["sampling_params"] | {"stop": stop}}
            with pytest.raises(UserError, match="stop"):
                service.sample(ME, sampler, 1, asked)

    asyncio.run(main())
    if isinstance(stop, str) or isinstance(stop[0], str):
        with pytest.raises(UserError, match="stop string"):
            CompletionsRequest(model="m", prompt="p", stop=stop).check(256)


def test_a_stream_with_the_most_and_longest_stops_takes_milliseconds_a_slice():
    stops = [chr(97 + i % 26) * 255 + str(i % 10) for i in range(64)]

    def decode(tokens):
        return "".join(map(chr, tokens))

    text = PartialText(decode, decode, stops)
    began = time.process_time()
    text.add([98] * 16, is_end=False)
    assert time.process_time() - began < 1


def test_what_rows_hold_of_a_client_is_bounded(tmp_path):
    """Else 10,000 sessions of 8 MiB each pass the quota, and one page of them fills the memory."""
    large = {"notes": "x" * (1 << 14)}

    async def main():
        async with living(tmp_path / "a") as service:
            session = service.create_session(ME, None, {"notes": "x"})
            model = await make_model(service, session)
            for call in (
                lambda: service.create_session(ME, None, large),
                lambda: service.create_session(ME, "x" * (1 << 15), None),
                lambda: service.create_model(ME, session, 1, NAME, LORA | {"user_metadata": large}),
                lambda: service.save(ME, "save_weights", model, 1, {"path": "a", "user_metadata": large}),
            ):
                with pytest.raises(UserError, match="it may have 16384"):
                    call()

    asyncio.run(main())


def test_a_request_names_no_more_sequences_than_can_be_made():
    """Each column is a sequence with arrays of its own: 2 million of two tokens would take gigabytes."""
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.zeros(1, np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = pb.DTYPE_INT64, np.zeros((1, 128), np.int64).tobytes()
    targets.shape.extend((1, 128))
    for _ in range(1023):  # as the SDK sends it at most
        request.data.add().CopyFrom(datum)
    wire.head_of(request.SerializeToString(), WireLimits())
    request.data.add().CopyFrom(datum)
    with pytest.raises(UserError, match=r"over 131072 columns of targets"):
        wire.head_of(request.SerializeToString(), WireLimits())


def test_a_sample_that_a_restarted_server_cannot_take_fails_alone(tmp_path):
    """Its context, or its limits, are smaller than those of the server that took the request."""

    async def first():
        async with living(tmp_path / "a") as service:
            service.backend.delay = 100.0
            sampler = service.create_sampler(ME, service.create_session(ME, None, None), 0, NAME, None)
            many = service.sample(ME, sampler, 1, SAMPLE | {"num_samples": 9})
            return many, service.sample(ME, sampler, 2, SAMPLE)

    async def second(many, one):
        async with living(tmp_path / "a", Limits(max_samples=8)) as service:
            row = await answered(service, many, state="refused")
            assert b"num_samples=9" in row.result
            await answered(service, one)

    asyncio.run(second(*asyncio.run(first())))
