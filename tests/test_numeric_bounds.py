"""Every numeric bound says what holds it on any machine (numeric_bounds.py)."""

import pytest

from tests.numeric_bounds import KINDS, ROOT, TABLE, bounds, bounds_of, table


def test_every_bound_says_what_holds_it():
    unsaid = [f"{b.path}:{b.line}: {b.text}" for b in bounds() if b.kind not in KINDS]
    assert not unsaid, "add `# holds: KIND, WHY` (tests/numeric_bounds.py):\n" + "\n".join(unsaid)
    bare = [f"{b.path}:{b.line}" for b in bounds() if b.kind == "meaning" and not b.why]
    assert not bare, f"say which meaning: {bare}"


def test_the_table_is_current():
    assert TABLE.read_text() == table(), "run python -m tests.numeric_bounds"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("assert x < 1e-5", None),
        ("assert x < 1e-5  # holds: exact", "exact"),
        ("# holds: meaning, half\nassert 0.5 * y > x", "meaning"),
        ("# holds: exact\n\nassert x == approx(y)", "exact"),
        ("# holds: exact\n\nassert x == approx(y)  # holds: meaning, z", "meaning"),
        ("assert torch.allclose(a, b)", None),
        ("SMALL = 1e-6\nassert x < SMALL", None),
        ("@mark.parametrize('a, near', [(1, 1e-5)])\ndef f(a, near):\n    assert x < near", None),
        ("assert x < case.limit", None),
        ("assert time.monotonic() - began < 5", "clock"),
        ("run(command, timeout=30)", "clock"),
        ("assert_close_as(a, b, c)", "reference"),
    ],
)
def test_what_a_bound_is(source, kind):
    (bound,) = bounds_of(source, ROOT / "tests" / "test_example.py")
    assert bound.kind == kind


@pytest.mark.parametrize("source", ["assert len(a) < 3", "b = rng.random() < 0.5", "lr = 1e-5", "x == 0.5"])
def test_what_is_none(source):
    assert not list(bounds_of(source, ROOT / "tests" / "test_example.py"))
