"""Protobuf to records and back, against the SDK's own conversions."""

# holds: exact

import numpy as np
import pytest

from rl.tinker.prompt_scores import Scores
from rl.tinker.wire_limits import WireLimits

pytest.importorskip("tinker", reason="needs the extra `serve`")
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types.tensor_data import TensorData

from rl.tinker import wire
from rl.tinker.backend import Learned, UserError
from rl.types import Completion, StopReason, VersionRange


def sent(data, loss="cross_entropy", config=None):
    given_ = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(forward_backward_input=given_, model_id="m", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_the_sdk_sends_is_what_is_read(data):
    n, k = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 4))
    shape = (n, k) if k else (n,)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    targets, weights = rng.integers(0, 100, shape), rng.normal(size=shape).astype(np.float32)
    empty = rng.random(shape) < 0.5
    if k:  # the SDK sends what is mostly 0 as sparse
        targets[empty], weights[empty] = 0, 0
    tokens = rng.integers(0, 100, n).tolist()
    inputs = {
        "target_tokens": TensorData.from_numpy(targets),
        "weights": TensorData.from_numpy(weights),
    }
    if k and data.draw(st.booleans()):
        import torch

        inputs = {name: TensorData.from_torch_sparse(torch.tensor(t)) for name, t in
                  (("target_tokens", targets), ("weights", weights))}  # fmt: skip
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    read = wire.read_forward_backward(sent([datum], "ppo", {"clip_low_threshold": 0.5}))
    assert (read.model_id, read.seq_id, read.loss, read.config) == (
        "m",
        3,
        "ppo",
        {"clip_low_threshold": 0.5},
    )
    assert read.data[0].tokens.tolist() == tokens
    assert np.array_equal(read.data[0].targets, targets)
    assert np.array_equal(read.data[0].inputs["weights"], weights)


def test_what_is_written_is_what_the_sdk_reads():
    arrays = [np.arange(3, dtype=np.float32), np.ones((2, 4), np.float32), np.zeros((5, 4), np.float32)]
    read = deserialize_forward_backward_output(wire.write_learned(Learned(arrays, {"loss:sum": 1.5})))
    assert read.metrics == {"loss:sum": 1.5}
    for got, array in zip(read.loss_fn_outputs, arrays, strict=True):
        assert np.array_equal(np.array(got["logprobs"].data).reshape(got["logprobs"].shape), array)
    one = Completion(
        [5, 6], [-1.0, -2.0], VersionRange(0, 0), StopReason.STOP,
        likeliest=(((5, -1.0), (9, -3.0)), ((6, -2.0),)), num_cached_tokens=7,
        prompt_logprobs=(None, -0.5), prompt_likeliest=((), ((4, -0.1),)),
    )  # fmt: skip
    read = deserialize_sample_response(wire.write_samples([one, one], 2, 1))
    assert [s.tokens for s in read.sequences] == [[5, 6]] * 2 and read.sequences[0].stop_reason == "stop"
    assert read.sequences[0].logprobs == [-1.0, -2.0] and read.prompt_cache_hit_tokens == 7
    assert read.prompt_logprobs == [None, -0.5]
    assert read.topk_prompt_logprobs == [None, [(4, pytest.approx(-0.1))]]
    assert read.sequences[0].topk_logprobs == [[(5, -1.0), (9, -3.0)], [(6, -2.0)]]


@pytest.mark.parametrize(
    ("rows", "columns", "values", "shape"),
    [
        ([0, 1], [0], [1], [2, 2]),
        ([0, 2, 1], [0], [1], [2, 2]),
        ([0, 1, 1], [9], [1], [2, 2]),
        ([0, 1, 1], [2], [1], [2, 2]),
        ([0, 1, 1], [-1], [1], [2, 2]),
        ([0, 1, 1], [0], [1], [1 << 40, 1 << 40]),
        ([0, 1, 1], [0], [1], [-2, 2]),
        ([0, 1, 1], [0], [1], [4]),
    ],
)
def test_sparse_tensors_that_are_none_are_refused(rows, columns, values, shape):
    message = wire.pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2], np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = wire.pb.DTYPE_INT64
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.asarray(values, np.int64).tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(rows, np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.asarray(columns, np.int64).tobytes()
    with pytest.raises(UserError, match="target_tokens"):
        wire.read_forward_backward(message.SerializeToString())


@pytest.mark.parametrize("kind", ["image", "dmel", None])
def test_a_chunk_that_is_no_text_is_refused_and_not_left_out(kind):
    message = wire.pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for data_chunks in (1, 2):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray([1, 2], np.int32).tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype, tensor.dense = wire.pb.DTYPE_INT64, np.asarray([2, 3], np.int64).tobytes()
        if data_chunks == 1:
            assert len(wire.read_forward_backward(message.SerializeToString()).data) == 1
    chunk = datum.model_input.add()
    if kind:
        getattr(chunk, kind).SetInParent()
    named = kind or "nothing"
    with pytest.raises(UserError, match=f"^datum 1: a chunk of {named}; only tokens are offered here$"):
        wire.read_forward_backward(message.SerializeToString())


def test_records_say_how_many_data_they_hold():
    """A run of data with equal trailing shapes is a record."""
    arrays = [np.ones(3), np.ones(2), np.ones((2, 4)), np.ones(1)]
    written = wire.pb.ForwardBackwardOutput.FromString(wire.write_learned(Learned(arrays, {})))
    assert [record.num_datums for record in written.loss_fn_outputs] == [2, 1, 1]


def test_what_was_not_asked_for_is_not_there():
    cut = Completion([5], [-1.0], VersionRange(0, 0), StopReason.LENGTH)
    read = deserialize_sample_response(wire.write_samples([cut], 0, 0))
    assert read.prompt_logprobs is None and read.topk_prompt_logprobs is None
    assert read.sequences[0].stop_reason == "length"


def test_scores_along_a_prompt_are_what_the_sdk_reads():
    one = Completion([5], [-1.0], VersionRange(0, 0), StopReason.STOP)
    drawn = np.array([[3, 4], [5, 6]], np.int64), np.array([[-0.5, -1.5], [-2.5, -3.5]], np.float32)
    dense = {"data": [-1.0, 0.0, 0.0, -2.0], "dtype": "int64", "shape": [2, 2]}
    sparse = dense | {"data": [-1.0, -2.0], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 1]}
    for targets in (dense, sparse):
        written = wire.write_samples([one], 0, 0, Scores(targets, drawn))
        read = deserialize_sample_response(written)
        scored, other = read.target_prompt_logprobs, read.prompt_alt_tokens
        assert scored.dtype == "float32" and (scored.sparse_crow_indices is None) == (targets is dense)
        assert scored.to_torch().to_dense().tolist() == [[-1.0, 0.0], [0.0, -2.0]]
        assert (other.tokens.shape, other.tokens.data) == ([2, 2], [3, 4, 5, 6])
        assert (other.logprobs.shape, other.logprobs.data) == ([2, 2], [-0.5, -1.5, -2.5, -3.5])


def one_datum(**settings):
    """A request with two tokens and their targets."""
    message = wire.pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="dro", **settings)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2], np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = wire.pb.DTYPE_INT64, np.asarray([2, 3], np.int64).tobytes()
    return message


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_forward_is_told_from_a_forward_backward(forward_only):
    body = one_datum(forward_only=forward_only).SerializeToString()
    kind = "forward" if forward_only else "forward_backward"
    assert wire.head_of(body, WireLimits()) == (kind, "m", 1)
    assert wire.read_forward_backward(body).forward_only is forward_only


def test_what_cannot_be_read_is_an_error_of_the_clients():
    text, unknown, targetless = one_datum(), one_datum(), one_datum()
    text.loss_fn_config_v2["beta"].text = "high"
    unknown.data[0].loss_fn_inputs["target_tokens"].dtype = wire.pb.DTYPE_BFLOAT16
    targetless.data[0].loss_fn_inputs.clear()
    for message, match in [
        (text, r"^loss_fn_config\['beta'\] is text; the losses here take numbers$"),
        (unknown, "^datum 0: target_tokens has dtype 4; send float32 or int64$"),
        (targetless, "^datum 0: it has no target_tokens; put them into loss_fn_inputs$"),
    ]:
        with pytest.raises(UserError, match=match):
            wire.read_forward_backward(message.SerializeToString())
    with pytest.raises(UserError, match="^the body is not a ForwardBackwardRequest"):
        wire.read_forward_backward(b"\xff\xfe")


def test_a_datum_without_a_chunk_has_no_tokens():
    message = one_datum()
    del message.data[0].model_input[:]
    (datum,) = wire.read_forward_backward(message.SerializeToString()).data
    assert datum.tokens.tolist() == [] and datum.targets.tolist() == [2, 3]
