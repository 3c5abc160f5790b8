"""Every test that starts a server runs twice: on SQLite, and on PostgreSQL where the extra `postgres` is installed.

Quick on PostgreSQL are those of what a database may do otherwise; the others are `slow` there.
"""

import asyncio
import contextlib

import pytest

from tests.tinker import databases, postgres

with contextlib.suppress(ModuleNotFoundError):  # needs the extra `serve`
    from tinker._base_client import AsyncHttpxClientWrapper
    from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton as sdk

    def _close(client: AsyncHttpxClientWrapper) -> None:
        """In the loop of its connections. The SDK closes an HTTP client in the loop of whichever thread collects it.

        Here that may be the server's thread. asyncio's loops are not thread-safe: about one test in 200 then waited 60
        seconds for an answer that was there.
        """
        loop = sdk.loop_if_started()
        if loop is not None and not client.is_closed:
            asyncio.run_coroutine_threadsafe(client.aclose(), loop)

    AsyncHttpxClientWrapper.__del__ = _close

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
