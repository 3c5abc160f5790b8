"""What an error shows of the log that it names."""

import os

from rl.observability.log_tail import log_tail


def test_the_end_of_the_log_that_was_written_to_last(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for number, (name, text) in enumerate([("trainer-0", "old\n"), ("trainer-1", "x\n" * 9 + "\nlast\n")]):
        (logs / f"{name}.log").write_text(text)
        os.utime(logs / f"{name}.log", (number, number))
    (logs / "trainer-2.log").write_text("\n")
    (logs / "trainer-3.log").symlink_to("/dev/full")  # which never ends
    said = log_tail(tmp_path, "trainer died; see logs/trainer*.log of the run")
    assert said.splitlines() == [f"the end of {logs}/trainer-1.log:", *["  x"] * 7, "  last"]
    assert "old" in log_tail(tmp_path, "it failed; see logs/trainer-0.log of the run")
    assert "last" in log_tail(tmp_path, "all have died; see their logs under the run's logs/")
    assert log_tail(tmp_path, "no memory; lower x") == log_tail(tmp_path, "see logs/generator*.log") == ""
    assert log_tail(tmp_path / "none", "see logs/") == ""


def test_of_a_long_line_the_end(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "reward-0.log").write_text("é" * 10**5 + "end")
    said = log_tail(tmp_path, "see logs/reward-0.log")
    assert said.endswith("end\n") and len(said) < 9000


def test_the_log_of_one_rank_and_of_no_other_process(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for number, name in enumerate(("trainer", "generator-1", "generator-1-0", "generator-10", "trainers")):
        (logs / f"{name}.log").write_text(f"of {name}\n")
        os.utime(logs / f"{name}.log", (number, number))
    assert log_tail(tmp_path, "see logs/trainer*.log of the run").endswith("  of trainer\n")
    assert log_tail(tmp_path, "see logs/generator-1*.log of the run").endswith("  of generator-1-0\n")
