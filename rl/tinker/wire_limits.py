"""How large a protobuf body may become, before anything is made of it.

A body of a few bytes may name a tensor of any shape, and one of 64 MiB may hold 30 million empty messages,
each of which takes a hundred bytes once it is parsed.
"""

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from rl.tinker.backend import UserError

_SMALL_BYTES = 1 << 16  # cannot become large
_MAX_FIELDS = 200_000  # of a body with 1,024 data, as the SDK sends them: 30,000
_MAX_PACKED_BYTES = 1 << 12  # of a list of numbers: a shape has two
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class WireLimits:
    """What one forward_backward may hold."""

    max_tokens: int = 2**21
    """Targets: the sum of N * K."""
    max_targets: int = 128
    """K."""
    max_sequences: int = 2**17
    """The sum of K."""

    def check(self, message: Any) -> None:
        """Raises UserError, by the shapes alone: a sparse tensor is not made dense for it."""
        total = num_sequences = 0
        for i, datum in enumerate(message.data):
            num_tokens = sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input) // 4
            largest, most_columns = num_tokens, 1
            for name, tensor in datum.loss_fn_inputs.items():
                shape = list(tensor.shape)
                if len(shape) > 2 or any(size < 0 for size in shape):
                    raise UserError(f"datum {i}: {name} has shape {shape[:8]}; make it [N] or [N, K]")
                columns = shape[1] if len(shape) == 2 else 1
                if columns > self.max_targets:
                    raise UserError(
                        f"datum {i}: {name} has {columns} columns, and limits.max_targets is "
                        f"{self.max_targets}; send fewer targets a token"
                    )
                if shape and shape[0] > num_tokens:
                    raise UserError(
                        f"datum {i}: {name} has {shape[0]} rows for {num_tokens} input tokens; make them "
                        f"equal"
                    )
                largest, most_columns = max(largest, num_tokens * columns), max(most_columns, columns)
            total += largest
            num_sequences += most_columns
            if num_sequences > self.max_sequences:
                raise UserError(
                    f"this request has over {self.max_sequences} columns of targets, which is "
                    f"limits.max_request_sequences; send less at once: gradients accumulate until optim_step"
                )
            if total > self.max_tokens:
                raise UserError(
                    f"this request has over {self.max_tokens} targets, which is limits.max_request_tokens; "
                    f"send less at once: gradients accumulate until optim_step"
                )


def check_fields(body: bytes, descriptor: Descriptor) -> None:
    """Raises UserError where the message would take far more memory than its bytes.

    It is walked, not parsed: messages within messages as the descriptor names them.
    """
    if len(body) <= _SMALL_BYTES:
        return
    num_fields = 0
    waiting = [(0, len(body), descriptor)]
    while waiting:
        position, end, message = waiting.pop()
        while position < end:
            num_fields += 1
            if num_fields > _MAX_FIELDS:
                raise UserError(f"the body has over {_MAX_FIELDS} fields; send less at once")
            key, position = _varint(body, position, end)
            field = message.fields_by_number.get(key >> 3)
            kind = key & 7
            if kind == _VARINT:
                _, position = _varint(body, position, end)
            elif kind in (_FIXED32, _FIXED64):
                position += 4 if kind == _FIXED32 else 8
            elif kind == _BYTES:
                size, position = _varint(body, position, end)
                if size > end - position:
                    raise UserError("the body is cut off; send it with the tinker SDK, 0.25 or newer")
                if field is not None and field.message_type is not None:
                    waiting.append((position, position + size, field.message_type))
                elif _is_list(field) and size > _MAX_PACKED_BYTES:
                    raise UserError(
                        f"{field.name} is a list of {size} bytes; it may have {_MAX_PACKED_BYTES}"
                    )
                position += size
            else:
                raise UserError(
                    "the body is not a ForwardBackwardRequest; send it with the tinker SDK, 0.25 or newer"
                )


def _is_list(field: FieldDescriptor | None) -> bool:
    """Of numbers, which take eight bytes each where they may be sent as one."""
    texts = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)
    return field is not None and field.is_repeated and field.type not in texts


def _varint(body: bytes, position: int, end: int) -> tuple[int, int]:
    """(value, where it ends)"""
    value = shift = 0
    while position < end and shift < 70:
        byte = body[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise UserError("the body is cut off; send it with the tinker SDK, 0.25 or newer")
