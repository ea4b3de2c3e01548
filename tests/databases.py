"""A server of PostgreSQL, which the tests start and end, and stores by it and by SQLite."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from trio_accel.cluster import PostgresStore, SqliteStore

__all__ = ["MakeStore", "Server", "Stores", "make_postgres", "make_sqlite", "make_store", "postgres"]

_databases = itertools.count(1)


@attrs.frozen
class Stores:
    """Stores of one database.

    Args:
        make: Makes a store.
        connect: Connects to the database, without a store.
    """

    make: Callable[..., Any]
    connect: Callable[[], Any]

    def __call__(self, **options: Any) -> Any:
        return self.make(**options)

    def rows(self) -> list[int]:
        """Return how many rows the tables of owners, saved states and messages have."""
        with closing(self.connect()) as database:
            tables = ("accel_owners", "accel_saves", "accel_messages")
            return [database.execute(f"select count(*) from {table}").fetchone()[0] for table in tables]


MakeStore = Stores


@attrs.frozen
class Server:
    """A server reachable by a socket in its folder, and by no network."""

    folder: Path
    programs: Path
    user: dict[str, Any]

    def run(self, program: str, *arguments: str) -> None:
        # A pipe would be the server's too, and never end.
        with (self.folder / "output").open("a") as output:
            ran = subprocess.run(
                [str(self.programs / program), "-D", str(self.folder / "data"), *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                **self.user,
            )
        assert ran.returncode == 0, (self.folder / "output").read_text()

    def start(self) -> None:
        self.run("pg_ctl", "start", "-w", "-s", "-l", str(self.folder / "log"))

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "-w", "-s", "-m", "immediate")

    def processes(self) -> list[int]:
        """Numbers of the server's processes, the first one's at the end."""
        first = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        return [*map(int, children), first]

    def dsn(self, database: str = "postgres") -> str:
        return f"host={self.folder} user=trio dbname={database}"


def _programs() -> Path | None:
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    # Debian installs them outside of the path.
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "pg_ctl").exists()), None)


def _user() -> dict[str, Any]:
    """Whom the server runs as: it refuses to be root's."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = known.get("postgres") or known.get("nobody")
    if entry is None:
        pytest.skip("PostgreSQL does not run as root, and there is no other user")
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def postgres() -> Generator[Server, None, None]:
    """A running server; a test that stops it starts it again."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: the extra `postgres`")
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: no initdb and pg_ctl")
    user = _user()
    # The paths of pytest may be too long for a socket, and are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="accel"))
    try:
        if user:
            os.chown(folder, user["user"], user["group"])
        server = Server(folder, programs, user)
        server.run("initdb", "--no-sync", "-A", "trust", "-U", "trio", "-E", "UTF8", "--locale=C")
        with (folder / "data" / "postgresql.conf").open("a") as file:
            file.write(f"listen_addresses = ''\nunix_socket_directories = '{folder}'\n")
            # The server ends with the tests, and no power is cut.
            file.write("fsync = off\nshared_buffers = 16MB\nmax_connections = 40\n")
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def make_postgres(postgres: Server) -> MakeStore:
    """Make stores on one new PostgreSQL database."""
    import psycopg

    name = f"tests_{next(_databases)}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"create database {name}".encode())
    return Stores(
        lambda **options: PostgresStore(postgres.dsn(name), **options),
        partial(psycopg.connect, postgres.dsn(name)),
    )


@pytest.fixture
def make_sqlite(tmp_path: Path) -> MakeStore:
    """Make stores of one new file."""
    path = tmp_path / "store.db"
    return Stores(lambda **options: SqliteStore(path, **options), partial(sqlite3.connect, path))


@pytest.fixture(params=["sqlite", "postgres"])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    """Make stores of one new database."""
    made: MakeStore = request.getfixturevalue(f"make_{request.param}")
    return made
