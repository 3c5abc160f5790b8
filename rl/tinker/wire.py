"""Tinker's protobuf messages to and from plain records. The classes ship with the SDK."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from rl.tinker.backend import Datum, Learned, UserError
from rl.tinker.prompt_scores import Scores
from rl.tinker.wire_limits import WireLimits, check_fields
from rl.types import Completion, Likeliest, StopReason

PROTOBUF = "application/x-protobuf"
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
_MASKED = -99999.0  # the logprob of a place in a list of the likeliest that has no token


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A forward_backward request."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    config: dict[str, float]
    forward_only: bool


def head_of(body: bytes, limits: WireLimits) -> tuple[str, str, int]:
    """Of a forward_backward request: forward or forward_backward, model_id, seq_id.

    Raises UserError where it is not one, or is too large: before anything is kept of it.
    """
    message = _parse(body)
    limits.check(message)
    kind = "forward" if message.forward_only else "forward_backward"
    return kind, message.model_id, message.seq_id


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Raises UserError where it is malformed."""
    message = _parse(body)
    config: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise UserError(f"loss_fn_config[{name!r}] is text; the losses here take numbers")
        config[name] = value.number
    data = []
    for i, datum in enumerate(message.data):
        try:
            data.append(_datum(datum))
        except (ValueError, TypeError) as error:
            raise UserError(f"datum {i}: {error}") from error
    return ForwardBackward(
        message.model_id, message.seq_id, data, message.loss_fn, config, message.forward_only
    )


def _parse(body: bytes) -> Any:
    check_fields(body, pb.ForwardBackwardRequest.DESCRIPTOR)
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise UserError(
            "the body is not a ForwardBackwardRequest; send it with the tinker SDK, 0.25 or newer"
        ) from error


def _datum(datum: Any) -> Datum:
    chunks = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"a chunk of {kind or 'nothing'}; only tokens are offered here")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(chunks or [np.zeros(0, np.int32)]).astype(np.int64)
    inputs = {name: _tensor(tensor, name) for name, tensor in datum.loss_fn_inputs.items()}
    if "target_tokens" not in inputs:
        raise ValueError("it has no target_tokens; put them into loss_fn_inputs")
    targets = inputs.pop("target_tokens").astype(np.int64)
    return Datum(tokens, targets, {name: values.astype(np.float32) for name, values in inputs.items()})


def _tensor(tensor: Any, name: str) -> np.ndarray:
    """Dense. Raises ValueError where bytes and shape disagree."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}; send float32 or int64")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape) if shape else values
    values = np.frombuffer(tensor.sparse_csr.values, dtype)
    rows = np.frombuffer(tensor.sparse_csr.crow_indices, np.int64)
    columns = np.frombuffer(tensor.sparse_csr.col_indices, np.int64)
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise ValueError(f"{name} is not a sparse [N, K] tensor in CSR form")
    counts = np.diff(rows)
    if rows[0] != 0 or (counts < 0).any() or rows[-1] != len(values):
        raise ValueError(f"{name} has row indices that are not in order")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise ValueError(f"{name} has a column outside its shape {list(shape)}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def write_learned(learned: Learned) -> bytes:
    """ForwardBackwardOutput, with one record for each run of data whose targets have the same K."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="TokenLogprobs")
    runs: list[list[np.ndarray]] = []
    for logprobs in learned.logprobs:
        if not runs or runs[-1][0].shape[1:] != logprobs.shape[1:]:
            runs.append([])
        runs[-1].append(logprobs.astype(np.float32))
    for run in runs:
        record = message.loss_fn_outputs.add(type_tag="TokenLogprobs", num_datums=len(run))
        field = record.fields["logprobs"]
        field.data = b"".join(array.tobytes() for array in run)
        field.offsets = np.cumsum([0, *(array.nbytes for array in run)], dtype=np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(run[0].shape[1:])
    for name, value in learned.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def write_samples(
    completions: Sequence[Completion], num_likeliest: int, prompt_likeliest: int, scores: Scores = Scores()
) -> bytes:
    """SampleResponse. The counts: how many of the likeliest tokens were asked for."""
    message = pb.SampleResponse()
    for completion in completions:
        stop = pb.STOP_REASON_STOP if completion.stop == StopReason.STOP else pb.STOP_REASON_LENGTH
        sequence = message.sequences.add(stop_reason=stop)
        sequence.tokens = completion.tokens.tobytes()
        sequence.logprobs = completion.logprobs.tobytes()
        if num_likeliest:
            _write_likeliest(sequence.topk_sampled_logprobs, completion.likeliest, num_likeliest)
    first = completions[0]
    if first.prompt_logprobs:
        of_prompt = [np.nan if value is None else value for value in first.prompt_logprobs]
        message.prompt_logprobs = np.asarray(of_prompt, np.float32).tobytes()
    if prompt_likeliest:
        _write_likeliest(message.topk_prompt_logprobs, first.prompt_likeliest, prompt_likeliest)
    message.prompt_cache_hit_tokens = first.num_cached_tokens
    if scores.targets:
        _write_logprobs(message.target_prompt_logprobs, scores.targets)
    if scores.drawn:
        for tensor, values, dtype in zip(
            (message.prompt_alt_tokens.tokens, message.prompt_alt_tokens.logprobs),
            scores.drawn,
            (pb.DTYPE_INT64, pb.DTYPE_FLOAT32),
            strict=True,
        ):
            tensor.dense, tensor.dtype = values.tobytes(), dtype
            tensor.shape.extend(values.shape)
    return message.SerializeToString()


def _write_logprobs(message: Any, tensor: Mapping[str, Any]) -> None:
    """tensor: TensorData, dense or sparse."""
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(tensor["shape"])
    values = np.asarray(tensor["data"], np.float32).tobytes()
    if tensor.get("sparse_crow_indices") is None:
        message.dense = values
        return
    sparse = message.sparse_csr
    sparse.values = values
    sparse.crow_indices = np.asarray(tensor["sparse_crow_indices"], np.int64).tobytes()
    sparse.col_indices = np.asarray(tensor["sparse_col_indices"], np.int64).tobytes()


def _write_likeliest(message: Any, places: Sequence[Likeliest], k: int) -> None:
    tokens = np.zeros((len(places), k), np.int32)
    logprobs = np.full((len(places), k), _MASKED, np.float32)
    for i, place in enumerate(places):
        for j, (token, logprob) in enumerate(place):
            tokens[i, j], logprobs[i, j] = token, logprob
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = k, len(places)
