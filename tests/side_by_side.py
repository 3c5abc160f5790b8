"""How pytest-xdist deals out the tests: with `pytest -n 2` one worker runs those that start processes, one after the
other, while the other takes file after file."""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Tests that start engines, generators, whole runs or servers: each takes every core.
PROCESSES = (
    "tests/chaos/",
    "tests/hosts/",
    "tests/integration/",
    "tests/models/test_checkpoint.py",
    "tests/models/test_conformance.py",
    "tests/models/test_fake_device.py",
    "tests/models/test_generator.py",
    "tests/models/test_generator_adapters.py",
    "tests/models/test_value_head.py",
    "tests/test_examples.py",
    "tests/tinker/test_cookbook.py",  # its server plans with 15 GiB
)
WITHOUT_DEADLINES = "tests/integration/test_learning.py"  # may share the cores with one of the others


class SideBySide(LoadScopeScheduling):
    """With what pytest-xdist 3.8 lacks where a worker crashes: the one in its place waits for ever for a file that is
    done, or with a single test, which it runs once it has another."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "processes" if file.startswith(PROCESSES) and file != WITHOUT_DEADLINES else file

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work[node]
        self.assigned_work[node] = {name: tests for name, tests in files.items() if not all(tests.values())}
        return super().remove_node(node)

    def schedule(self) -> None:
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)
