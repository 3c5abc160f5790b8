"""Which small mistakes are made: none that nothing could tell from the code by its kind."""

from tests.mutants import mutants_of

SOURCE = b"""\
if TYPE_CHECKING:
    import x
for a, b in zip(x, y, strict=True):
    print(a)
def f(a: int = 3) -> bool:
    if a < 2:
        return False
    return g(a)
"""


def test_mistakes_are_those_that_somebody_could_make():
    assert {f"{m.line} {m.kind} | {m.before} -> {m.after}" for m in mutants_of("a.py", SOURCE)} == {
        "3 swapped | zip(x, y, strict=True) -> zip(y, x, strict=True)",
        "5 constant | 3 -> 4",
        "6 comparison | a < 2 -> (a <= 2)",
        "6 condition | a < 2 -> True",
        "6 condition | a < 2 -> False",
        "6 constant | 2 -> 3",
        "7 constant | False -> True",
        "8 return | return g(a) -> return None",
    }
