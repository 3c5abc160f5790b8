"""What a test needs is there, or the test is skipped, or it fails where it is asked for."""

import pytest

from tests.needs import REMEDIES, VARIABLE, need


@pytest.mark.parametrize("name", REMEDIES)
def test_what_is_missing_skips_a_test_and_fails_it_where_it_is_asked_for(monkeypatch, name):
    monkeypatch.delenv(VARIABLE, raising=False)
    need(name, True)
    with pytest.raises(pytest.skip.Exception, match=f"needs {name}"):
        need(name, False)
    monkeypatch.setenv(VARIABLE, " ".join(REMEDIES))
    need(name, True)
    with pytest.raises(pytest.fail.Exception, match=f"needs {name}"):
        need(name, False)
    monkeypatch.setenv(VARIABLE, " ".join({*REMEDIES} - {name}))
    with pytest.raises(pytest.skip.Exception, match=f"needs {name}"):
        need(name, False)


def test_a_word_of_the_variable_that_is_no_name_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "chrome")
    with pytest.raises(ValueError, match="chrome"):
        need("chromium", False)
