"""Bodies that would become large: refused by what they say, before anything is made of them."""

# holds: exact, counts

import contextlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from rl.tinker import wire
from rl.tinker.backend import UserError
from rl.tinker.wire_limits import WireLimits, check_fields

MIB = 1 << 20


def message(shape, num_tokens=4, num_data=1, sparse=True):
    """forward_backward of data whose target_tokens are of the shape, and empty."""
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(num_data):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.zeros(num_tokens, np.int32).tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype = pb.DTYPE_INT64
        targets.shape.extend(shape)
        if sparse:
            targets.sparse_csr.crow_indices = np.zeros(shape[0] + 1, np.int64).tobytes()
        else:
            targets.dense = np.zeros(shape, np.int64).tobytes()
    return request


@pytest.mark.parametrize(
    ("shape", "num_tokens", "num_data", "what"),
    [
        ((4, 2**26), 4, 1, "datum 0: target_tokens has 67108864 columns, and limits.max_targets is 128"),
        ((4, 129), 4, 1, "129 columns"),
        ((4, 2**62), 4, 1, "columns"),
        ((5, 1), 4, 1, "5 rows for 4 input tokens"),
        ((4, -1), 4, 1, "make it"),
        ((1, 1, 1), 4, 1, "make it"),
        ((1000, 128), 1000, 17, "over 2097152 targets, which is limits.max_request_tokens"),
    ],
)
def test_a_few_bytes_cannot_name_much(shape, num_tokens, num_data, what):
    request = message((0, 0), num_tokens, num_data)
    for datum in request.data:
        del datum.loss_fn_inputs["target_tokens"].shape[:]
        datum.loss_fn_inputs["target_tokens"].shape.extend(shape)
    with pytest.raises(UserError, match=what):
        wire.head_of(request.SerializeToString(), WireLimits())


def test_as_much_as_the_sdk_sends_is_taken():
    body = message((300,), 300, 1024, sparse=False).SerializeToString()
    assert wire.head_of(body, WireLimits()) == ("forward_backward", "m", 1)
    assert len(wire.read_forward_backward(body).data) == 1024
    wire.head_of(message((300, 128), 300, 50).SerializeToString(), WireLimits())


def attacks() -> dict[str, bytes]:
    """140 MB."""
    shape = pb.Tensor(shape=[0] * MIB)
    datum = pb.Datum(loss_fn_inputs={"target_tokens": shape})
    return {
        "empty data": b"\x1a\x00" * (32 * MIB),
        "empty chunks in one datum": b"\x1a" + b"\x80\x80\x80\x1e" + b"\x0a\x00" * (30 * MIB),
        "a long packed shape": pb.ForwardBackwardRequest(data=[datum]).SerializeToString(),
        "settings": b"\x2a\x00" * (8 * MIB),
    }


_PARSE = """
import os, resource, sys
sys.path.insert(0, ".")
from rl.tinker import wire
from rl.tinker.backend import UserError
from rl.tinker.wire_limits import WireLimits
from tests.tinker.test_wire_limits import attacks
for name, body in attacks().items():  # each in a fork: the most memory that a process ever had is its own
    if not os.fork():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            wire.head_of(body, WireLimits())
        except UserError as error:
            print(name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error, sep="|", flush=True)
        os._exit(0)
    os.wait()
"""


def test_many_small_messages_are_counted_before_they_are_made():
    done = subprocess.run([sys.executable, "-c", _PARSE], capture_output=True, text=True, check=True)
    rows = [line.split("|", 2) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in rows] == [
        "empty data", "empty chunks in one datum", "a long packed shape", "settings"
    ]  # fmt: skip
    for name, kib, error in rows:
        assert int(kib) < 50 * 1024, name
        assert "fields; send less at once" in error or "is a list of" in error


_NUMBERS = st.integers(-(2**31), 2**31 - 1)
_TENSORS = st.builds(
    pb.Tensor,
    dense=st.binary(max_size=70_000),
    shape=st.lists(_NUMBERS, max_size=40),
    dtype=st.integers(0, 3),
)
_DATA = st.builds(
    pb.Datum,
    model_input=st.lists(
        st.builds(pb.Chunk, encoded_text=st.builds(pb.EncodedTextChunk, tokens=st.binary(max_size=9))),
        max_size=3,
    ),
    loss_fn_inputs=st.dictionaries(st.text(max_size=9), _TENSORS, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(_DATA, max_size=4), st.integers(0, 255), st.data())
def test_what_the_parser_takes_is_walked_to_its_end(data, byte, draw):
    """And damaged bytes are walked, refused or not, without another error."""
    body = pb.ForwardBackwardRequest(data=data, model_id="m" * 70_000).SerializeToString()
    check_fields(body, pb.ForwardBackwardRequest.DESCRIPTOR)
    damaged = bytearray(body)
    damaged[draw.draw(st.integers(0, len(body) - 1))] = byte
    with contextlib.suppress(UserError):
        check_fields(bytes(damaged), pb.ForwardBackwardRequest.DESCRIPTOR)
