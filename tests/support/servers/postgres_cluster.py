"""PostgreSQL for tests: start a cluster in a temporary directory, and create databases in this or another cluster.

    python tests/support/servers/postgres_cluster.py pytest -q ...     # sets TWINKLE_TEST_POSTGRES to the cluster's URL

If TWINKLE_TEST_POSTGRES is set to a URL, tests create their databases in that cluster and drop them afterwards. The
role needs CREATEDB.
"""

import glob
import os
import pwd
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from sqlalchemy import make_url

VARIABLE = "TWINKLE_TEST_POSTGRES"
# Without fsync many small transactions are much faster. A crash of the process alone still loses nothing.
_SETTINGS = ("fsync=off", "listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=200")
_made: list[str] = []


def programs() -> Path:
    """Return the directory of initdb and pg_ctl in Debian's package, newest version."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: float(path.split("/")[-2]))
    if not found:
        sys.exit("PostgreSQL is not installed: nothing in /usr/lib/postgresql/*/bin; on Debian: apt install postgresql")
    return Path(found[-1])


class Cluster:
    """A PostgreSQL server on a port of 127.0.0.1, with a superuser role.

    If root runs the tests, it runs as ``postgres``.
    """

    def __init__(self) -> None:
        self._programs = programs()
        self._user = "postgres" if os.geteuid() == 0 else None
        self._directory = Path(tempfile.mkdtemp(prefix="twinkle-postgres-"))
        self._port = _free_port()
        self._password = secrets.token_hex(8)
        self.url = f"postgresql://tester:{self._password}@127.0.0.1:{self._port}/postgres"
        password_file = self._directory / "password"
        password_file.write_text(self._password)
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            for path in (self._directory, password_file):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        auth = ["--auth=scram-sha-256", "--username=tester", f"--pwfile={password_file}"]
        self._run("initdb", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8", *auth)
        self.start()

    def start(self) -> None:
        settings = " ".join(f"-c {setting}" for setting in (*_SETTINGS, f"port={self._port}"))
        self._run("pg_ctl", "start", "-w", "-o", settings, "-l", str(self._directory / "log"))

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: ``fast`` closes connections in order, ``immediate`` is like a crash."""
        self._run("pg_ctl", "stop", "-w", "-m", mode)

    def close(self) -> None:
        self._run("pg_ctl", "stop", "-m", "immediate", check=False)
        shutil.rmtree(self._directory)

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        command = [str(self._programs / program), "-D", str(self._directory / "data"), *arguments]
        done = subprocess.run(
            command, user=self._user, cwd=self._directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")


def _free_port() -> int:
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as listener:
            if listener.connect_ex(("127.0.0.1", port)) != 0:
                return port


# --- databases --------------------------------------------------------------------------------------------------------


def cluster_url() -> str | None:
    return os.environ.get(VARIABLE) or None


def new_database(cluster: str) -> str:
    """Create an empty database and return its URL."""
    name = f"twinkle_test_{secrets.token_hex(6)}"
    execute(cluster, f"CREATE DATABASE {name}")
    url = make_url(cluster).set(database=name).render_as_string(hide_password=False)
    if cluster == cluster_url():
        _made.append(name)
    return url


def drop_databases() -> None:
    """Drop all databases that :func:`new_database` created in the cluster of TWINKLE_TEST_POSTGRES."""
    cluster = cluster_url()
    while cluster is not None and _made:
        execute(cluster, f"DROP DATABASE IF EXISTS {_made.pop()} WITH (FORCE)")


def execute(url: str, sql: str) -> list[tuple[object, ...]]:
    """Execute and commit a statement; return its rows."""
    import psycopg  # installed by our extra `postgres`

    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql)
        return cursor.fetchall() if cursor.description is not None else []


if __name__ == "__main__":
    cluster = Cluster()
    try:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, VARIABLE: cluster.url}).returncode)
    finally:
        cluster.close()
