"""Files and threads that engines leave in a test's own process."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def groups_end_with_their_module():
    """Each engine's checkpoints have a gloo group, with a thread and four files, that lasts as long as its process.

    A run's process has one engine; a module of tests has up to a hundred.
    """
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
