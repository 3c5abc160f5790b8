"""Every engine under every layout computes what it computes in one process (see conformance.py)."""

import pytest

from tests.models.conformance import CASES, differences, run

# Layouts that combine what others have, and settings that do not depend on the layout.
IN_MAKE_TEST_ALL = [
    case
    for case in CASES
    if case.layout == "HSDP 2 x 2"
    or case.model in ("Llama", "Gemma 2")
    or "activation_checkpointing" in case.settings
    or (case.engine == "hf" and case.layout == "FSDP2 x 4")
]
PARAMETERS = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case in IN_MAKE_TEST_ALL)) for case in CASES
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Of the cases that were selected."""
    tests = [item for item in request.session.items if item.module is request.module]
    chosen = [item.callspec.params["case"] for item in tests if hasattr(item, "callspec")]
    return run(tmp_path_factory.mktemp("conformance"), chosen or CASES[:1])


@pytest.mark.parametrize("case", PARAMETERS)
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
