"""What the controller warns of is on stderr once, and in the run's progress.log."""

import asyncio
import io
import logging
import subprocess
import sys

from rl.observability.recorder import Recorder
from rl.observability.sinks import TrackingConfig, open_sinks
from rl.observability.timeline import Timeline

LOG = logging.getLogger("rl.actors.replica")


def test_warnings_of_a_run_are_on_stderr_and_in_progress_log(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's

    async def run():
        recorder = Recorder(
            tmp_path, 1, Timeline(), open_sinks(TrackingConfig(sinks=()), tmp_path, {}), out=io.StringIO()
        )
        async with recorder:
            LOG.warning("generator-%d died", 0)
            LOG.info("nobody asked for this")

    asyncio.run(run())
    LOG.warning("after the run")
    asyncio.run(run())
    died = "generator-0 died\n"
    assert capsys.readouterr().err == died + "after the run\n" + died
    lines = (tmp_path / "progress.log").read_text().splitlines()
    assert [line[20:] for line in lines] == [died.strip()] * 2  # after "2026-11-26 10:00:00 "


WITHIN_MONARCH = """
import asyncio, logging, sys
from monarch.actor import context
from rl.observability.warning_log import WarningLog

async def main():
    context()
    lines = []
    log = WarningLog(lines.append)
    log.attach()
    logging.getLogger("rl.actors.replica").warning("generator-0 died")
    log.detach()
    print(*(line[20:] for line in lines))

asyncio.run(main())
"""


def test_a_warning_is_as_it_was_written_in_an_actors_context():
    done = subprocess.run([sys.executable, "-c", WITHIN_MONARCH], capture_output=True, text=True, check=True)
    assert done.stdout == "generator-0 died\n" and "generator-0 died\n" in done.stderr
    assert "actor=" not in done.stderr


def test_where_a_program_has_handlers_of_its_own_warnings_are_theirs(tmp_path, capsys, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(out)])

    async def run():
        recorder = Recorder(
            tmp_path, 1, Timeline(), open_sinks(TrackingConfig(sinks=()), tmp_path, {}), out=io.StringIO()
        )
        async with recorder:
            LOG.warning("generator-0 died")

    asyncio.run(run())
    assert out.getvalue() == "generator-0 died\n"
    assert capsys.readouterr().err == ""
    assert "generator-0 died" in (tmp_path / "progress.log").read_text()
