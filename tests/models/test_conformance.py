"""Every engine under every layout computes what it computes in one process (see conformance.py)."""

import pytest

from tests.models.conformance import CASES, differences, limits, run

pytestmark = pytest.mark.timeout(900)  # of the first: one set of engines computes every case

# Each kind of parallelism, and each setting, once; the others are slow.
IN_MAKE_TEST = {
    "titan, Qwen3, FSDP2 x 2",
    "titan, Qwen3, FSDP2 x TP2",
    "titan, Qwen3, CP2 x TP2",
    "titan, Qwen3, dtype=bfloat16, FSDP2 x 2",
    "titan, Qwen3, float8=True, FSDP2 x 2",
    "titan, Qwen3, adapters=True, TP2",
    "titan, Qwen3-MoE, FSDP2 x TP2",
    "hf, Qwen3, FSDP2 x 2",
    "hf, Gemma 3, FSDP2 x 2",
    "hf, DeepSeek-V3, FSDP2 x 2",
}
assert {case.name for case in CASES} >= IN_MAKE_TEST
PARAMETERS = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name not in IN_MAKE_TEST))
    for case in CASES
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Of the cases that were selected, and the first."""
    tests = [item for item in request.session.items if item.module is request.module]
    chosen = [item.callspec.params["case"] for item in tests if hasattr(item, "callspec")]
    return run(tmp_path_factory.mktemp("conformance"), [CASES[0], *chosen])


@pytest.mark.parametrize("case", PARAMETERS)
def test_layout_equals_one_process(results, case):
    """Each is as near to float64 as the other, with a margin; random weights do not depend on the layout."""
    ours, allowed = results[case.name], limits(case, results)
    assert differences(ours, results[case.one_process.name])["initial"] == 0
    apart = differences(ours, results[case.exact.name])
    for name, limit in allowed.items():
        if name != "initial":
            assert apart[name] <= limit, name  # holds: reference
    assert allowed["gradients"] < 0.9  # holds: meaning, a tensor whose gradient is left out is 1 off


@pytest.mark.parametrize("case", [p for p in PARAMETERS if p.values[0].engine == "titan"])
def test_weights_of_a_directory_are_what_the_files_have_and_each_rank_reads_its_own(results, case):
    if case.settings.get("adapters"):
        assert "loaded" not in results[case.name]
        return
    loaded = results[case.name]["loaded"]
    assert not loaded["wrong"] and loaded["read"] == loaded["kept"]
    if case.layout.startswith("FSDP2 x 2"):  # and nothing else: no element is read twice
        assert sum(loaded["read"]) == loaded["file"] > max(loaded["read"])


def test_the_comparison_notices_gradients_that_are_off(results):
    one, exact = (results[case.name] for case in (CASES[0].one_process, CASES[0].exact))
    allowed = limits(CASES[0], results)["gradients"]
    assert differences(exact, exact)["gradients"] == 0
    name = min(one["gradients"], key=lambda n: one["gradients"][n].norm())
    for change in (lambda g: g * (1 + 2e-5), lambda g: 2 * g, lambda g: 0 * g):
        one_changed = one["gradients"] | {name: change(one["gradients"][name])}
        assert differences(one | {"gradients": one_changed}, exact)["gradients"] > allowed
