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
    assert found.pop("logprobs") < 100 * case.limit  # after three AdamW steps, which enlarge what gradients near 0 differ by
    assert max(found.values()) < case.limit, found


def test_the_comparison_notices_a_gradient_that_is_off(results):
    reference = results[CASES[0].one_process.name]
    wrong = reference | {"gradients": {name: g + 2e-5 for name, g in reference["gradients"].items()}}
    assert max(differences(reference, reference).values()) == 0
    assert differences(wrong, reference)["gradients"] > 1e-5
