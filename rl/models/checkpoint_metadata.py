"""The metadata of torch's checkpoints, read without the harm that a pickle can do.

torch unpickles `.metadata` as it is, and so would call whatever another's checkpoint names.
"""

import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta

_OF_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_OF_METADATA, name) for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}  # fmt: skip
"""What describes tensors and where they lie. Not BytesStorageMetadata: torch unpickles such an entry."""


class CheckpointReader(FileSystemReader):
    """torch's reader, for a checkpoint of tensors alone."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Raises pickle.UnpicklingError where there is more in it, and what unpickling raises."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = self.unpickled(file)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @staticmethod
    def unpickled(file: IO[bytes]) -> Metadata:
        metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, and no metadata")
        return metadata


def _member(of: object, name: object) -> Any:
    """What Python up to 3.11.3 writes as getattr(an enum, the name of a member)."""
    if of is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it takes {name} of {of}, which no description of tensors does")
    return _MEM_FORMAT_ENCODING[str(name)]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors does")
        return super().find_class(module.replace("pathlib._local", "pathlib"), name)
