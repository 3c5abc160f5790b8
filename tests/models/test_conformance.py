"""Every engine under every layout computes what it computes in one process (see conformance.py)."""

import pytest

from tests.models.conformance import CASES, differences, run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("conformance"), CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_one_process(results, case):
    found = differences(results[case.name], results[case.one_process.name])
    assert found.pop("initial") == 0
    # After three AdamW steps, which enlarge what gradients near 0 differ by.
    assert found.pop("logprobs") < (1e-3 if case.limit < 1e-3 else 1.0)
    if case.settings.get("float8"):
        assert found.pop("logits") < 1.0
    assert max(found.values()) < case.limit, found


def test_the_comparison_notices_gradients_that_are_off(results):
    reference = results[CASES[0].one_process.name]
    assert max(differences(reference, reference).values()) == 0
    name = min(reference["gradients"], key=lambda n: reference["gradients"][n].norm())
    for change, noticed in ((lambda g: g * (1 + 2e-5), 1e-5), (lambda g: 2 * g, 0.9), (lambda g: 0 * g, 0.9)):
        one_changed = reference["gradients"] | {name: change(reference["gradients"][name])}
        wrong = reference | {"gradients": one_changed}
        assert differences(wrong, reference)["gradients"] > noticed
    assert max(case.limit for case in CASES) < 0.9
