"""Every test that starts a server runs twice: on SQLite, and on PostgreSQL where the extra `postgres` is installed."""

import pytest

from tests.tinker import databases, postgres

_ABSENT = postgres.why_absent()
_KINDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.skipif(bool(_ABSENT), reason=_ABSENT or ""))]


@pytest.fixture(scope="module")
def database_kind(request):
    with databases.of_kind(request.param):
        yield request.param


def pytest_generate_tests(metafunc):
    if {"serving", "living", "url_of"} & set(vars(metafunc.module)):
        if "database_kind" not in metafunc.fixturenames:
            metafunc.fixturenames.insert(0, "database_kind")  # before any server starts
        metafunc.parametrize("database_kind", _KINDS, indirect=True, scope="module")
