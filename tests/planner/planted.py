"""Plans written into wisdom as anybody can write them who can write the file."""

from __future__ import annotations

import json
import time
from typing import Any

from tilewise import solvers
from tilewise.machine.device import environment
from tilewise.plan import Config, Plan
from tilewise.planner import Options
from tilewise.planner.remembered import plan_text
from tilewise.problems.conv.problem import ConvProblem
from tilewise.wisdom import Wisdom, tables
from tilewise.wisdom.database import Database
from tilewise.wisdom.tables import Row


def planted(wisdom: Wisdom, problem: ConvProblem, options: Options, data: dict[str, Any] | Plan) -> None:
    """A row with a right checksum, as anybody can write one who can write the file."""
    data = data.to_json() if isinstance(data, Plan) else data
    values = plan_text(options), json.dumps(data, separators=(",", ":")), time.time()
    row = Row(environment(problem.device).key, problem.key, values)
    Database(wisdom.path).write(lambda db: tables.insert(db, "plan", [row]))


def leaf(problem: ConvProblem, solver: str, config: Config, **claims: Any) -> Plan:
    return Plan(problem.key, solver, solvers.get(solver).version, config, time_ms=0.001, **claims)
