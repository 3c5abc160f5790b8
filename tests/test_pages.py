"""Pages of figures: each says where it comes from, text quotes it rightly, and which were made by other code.

How a page is written and what of its code counts: benchmarks/pages.py.
"""

# holds: exact

import re

import pytest

from benchmarks import pages
from benchmarks.pages import (
    PAGES,
    ROOT,
    agrees,
    changed_pages,
    code_hash,
    figures,
    quoted,
    quotes,
    stamp,
    table,
)

DOCS = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
TEXTS = DOCS | {name: (ROOT / f"{name}.md").read_text() for name in ("README", "ARCHITECTURE")}
MARKERS = [(name, *quote) for name, text in TEXTS.items() for quote in quotes(text)]


@pytest.mark.parametrize("name", sorted(PAGES.keys() & DOCS.keys()))
def test_a_page_says_its_command_its_machine_its_commit_and_its_code(name):
    head = "\n".join(DOCS[name].splitlines()[:8])
    assert re.search(r"Made by\s`python -m [\w.]+", head)
    assert re.search(r"Measured on [^;]+; .*commit [0-9a-f]{7}", head, re.DOTALL)
    assert stamp(name), "no <!-- code ... -->"


def test_every_page_that_a_benchmark_made_is_listed():
    made = {name for name, text in DOCS.items() if re.search(r"Made by\s`python -m benchmarks\.", text)}
    assert made - PAGES.keys() == set()
    assert {path for files in PAGES.values() for path in files if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize(("name", "written", "reference"), MARKERS, ids=[" ".join(m) for m in MARKERS])
def test_a_quoted_figure_is_the_pages(name, written, reference):
    assert agrees(written, quoted(reference)), (written, quoted(reference))


def test_what_it_costs_is_quoted_by_markers():
    """Each figure with a decimal point in README's table but versions and those of code names."""
    section = TEXTS["README"].partition("## What it costs")[2].partition("\n## ")[0]
    bare = re.sub(r"`[^`]*`|\]\([^)]*\)|\b(TRL|SkyRL|vLLM) \d[\d.]*", "", section)
    assert not re.findall(r"\d+\.\d+(?!\d*<!--)(?![\d.]*<!--)", bare)
    assert len(MARKERS) > 20


def test_layouts_differ_in_fp32_by_what_the_readme_says():
    (most,) = re.findall(r"In fp32 they differ from one process's by (\S+) at most there", TEXTS["README"])
    rows = [line.strip("| ").split(" | ") for line in DOCS["conformance"].splitlines() if "Engine | " in line]
    in_fp32 = [row[4:8] for row in rows if not re.search("bfloat16|float8", row[3])]
    assert len(in_fp32) > 30 and max(float(cell) for row in in_fp32 for cell in row) == float(most)


@pytest.mark.slow
def test_no_page_was_made_by_other_code():
    names = changed_pages()
    assert not names, f"run the commands that these pages name again: {', '.join(names)}"


CODE = '''
"""A module."""
import statistics
from benchmarks.other import helper

ROUNDS = 5

def measure(steps):
    """Measures."""
    found = [helper(step, times=2, size=8) for step in steps if step.is_long]
    print(f"{found[0]:.1f} is the first of them")
    return statistics.median(found) - min(found)
'''
OTHER = """
UNIT = 1000

def helper(step, times, size):
    return step.seconds * times * UNIT / size

def unused():
    return 1
"""


def hash_of(code=CODE, other=OTHER):
    files = {"benchmarks/page.py": code, "benchmarks/other.py": other}
    return code_hash("page", files.get)


@pytest.fixture
def page(monkeypatch):
    monkeypatch.setitem(PAGES, "page", ("benchmarks/page.py",))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Measures."""', '"""Says what the steps cost."""'),
        ("found", "seconds"),
        ("measure", "cost"),
        (":.1f} is the first of them", ":.2f} comes first"),
        ("    print", "\n    # why\n    print"),
        ("steps):", "steps: list[str]) -> float:"),
    ],
)
def test_words_and_names_are_no_other_code(page, old, new):
    assert old in CODE and hash_of(CODE.replace(old, new)) == hash_of()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ROUNDS = 5", "ROUNDS = 6"),
        ("median", "fmean"),
        ("min(", "max("),
        ("if step.is_long", ""),
        ("helper(step, ", "helper(steps, "),
        ("times=2, size=8", "times=8, size=2"),
        ("times=2", "rounds=2"),
        ("step.is_long", "step.is_short"),
        ("found[0]", "found[1]"),
        ("statistics.median(found) - min(found)", "min(found) - statistics.median(found)"),
    ],
)
def test_what_computes_is_other_code(page, old, new):
    assert old in CODE and hash_of(CODE.replace(old, new)) != hash_of()


def test_what_a_page_takes_from_another_file_counts_and_the_rest_of_that_does_not(page):
    assert hash_of(other=OTHER.replace("1000", "1024")) != hash_of()
    assert hash_of(other=OTHER.replace("return 1\n", "return 2\n")) == hash_of()
    assert hash_of(CODE.replace("helper", "seconds_of"), OTHER.replace("helper", "seconds_of")) == hash_of()


def test_a_figure_is_found_by_row_and_column_and_compared_to_the_digits_that_are_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    rows = [
        ["who", "what", "s/step", "of"],
        ["ours", "a", "1,120.5 (1 to 2)", "1"],
        ["ours", "b", "560", "70%"],
    ]
    (tmp_path / "docs" / "made_up.md").write_text(f"# Title\n\n{table(rows)}\n\ntext\n")
    figures.cache_clear()
    assert quoted("made_up; ours, a; s/step") == 1120.5
    assert quoted("made_up; ours, b; of") == 70
    assert quoted("made_up; ours, a; s/step over ours, b; s/step") == pytest.approx(2.0009, abs=1e-4)
    with pytest.raises(KeyError):
        quoted("made_up; ours; s/step")  # of two rows
    text = "It takes 1,120<!--made_up; ours, a; s/step--> s, 2.00<!--made_up; ours, a; s/step over ours, b; s/step--> times as long."
    assert [agrees(written, quoted(reference)) for written, reference in quotes(text)] == [True, True]
    assert not agrees("2.01", 2.0009) and not agrees("1,119", 1120.5) and agrees("2", 2.0009)
    figures.cache_clear()
