"""What tests need to look at the plugin's pages in a real Airflow: users of it, and connections in its database.

``python -m tests.system.pages_in_airflow`` is Airflow's own web application with users of each role, over the database
of an Airflow that runs: there everybody is administrator. It reads paths from its input and prints the answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.support.patience import patient

if TYPE_CHECKING:
    from demo.airflow_instance import LocalAirflow
    from tests.system.conftest import Session

ROLES = ("VIEWER", "USER", "OP", "ADMIN")
Answers = dict[str, list[tuple[int, str]]]


def guarded_connection(airflow: LocalAirflow, session: Session, conn_id: str = "guarded") -> str:
    """A connection in Airflow's database to the session behind a token."""
    from tests.system.conftest import TOKEN

    connection = {"connection_id": conn_id, "conn_type": "ckpt", "host": "127.0.0.1"}
    airflow.api.call("POST", "/connections", connection | {"port": session.guarded_port, "password": TOKEN})
    return conn_id


def visits(airflow: LocalAirflow, paths: list[str], changed: str) -> Answers:
    """Status and text of the paths below ``/ckpt/`` for each role and without any, and of changes of ``changed``."""
    users = {
        "_AIRFLOW_PROCESS_CONTEXT": "server",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{role}:{role.lower()}" for role in ROLES),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(airflow.home / "passwords.json"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.pages_in_airflow"],
        env=airflow.environment | users,
        input=json.dumps([paths, changed]),
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(240),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: Answers = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


def main() -> None:
    """Asks as everybody."""
    from airflow.api_fastapi.app import create_app, get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from fastapi.testclient import TestClient

    paths, changed = json.load(sys.stdin)
    client: Any = TestClient(create_app(apps="core"), follow_redirects=False)

    def headers(role: str) -> dict[str, str]:
        user: Any = SimpleAuthManagerUser(username=role, role=role)
        return {"Authorization": f"Bearer {get_auth_manager().generate_jwt(user)}"}

    def ask(method: str, path: str, sent: dict[str, str]) -> tuple[int, str]:
        answer = client.request(method, f"/ckpt/{path}", headers=sent)
        return answer.status_code, answer.text

    found: Answers = {"anonymous": [ask("GET", path, {}) for path in paths]}
    for role in ROLES:
        found[role] = [ask("GET", path, headers(role)) for path in paths]
    found["changes"] = [ask(method, changed, headers("ADMIN")) for method in ("PATCH", "POST", "DELETE")]
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # Airflow's application leaves threads behind


if __name__ == "__main__":
    main()
