"""Every test that starts a server runs twice: on SQLite, and on PostgreSQL where the extra `postgres` is installed.

Quick on PostgreSQL are those of what a database may do otherwise; the others are `slow` there.
"""

import pytest

from tests.tinker import databases, postgres

_ABSENT = postgres.why_absent()
_SKIP = pytest.mark.skipif(bool(_ABSENT), reason=_ABSENT or "")
_QUICK = ("test_outages", "test_restart", "test_retention")


@pytest.fixture(scope="module")
def database_kind(request):
    with databases.of_kind(request.param):
        yield request.param


def pytest_generate_tests(metafunc):
    if {"serving", "living", "url_of"} & set(vars(metafunc.module)):
        if "database_kind" not in metafunc.fixturenames:
            metafunc.fixturenames.insert(0, "database_kind")  # before any server starts
        is_quick = metafunc.module.__name__.rpartition(".")[2] in _QUICK
        on_postgres = pytest.param("postgres", marks=[_SKIP] if is_quick else [_SKIP, pytest.mark.slow])
        metafunc.parametrize("database_kind", ["sqlite", on_postgres], indirect=True, scope="module")
