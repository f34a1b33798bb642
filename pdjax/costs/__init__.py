"""How long steps last, by paper, table, fit or record: functions that return a `pdjax.cost.Cost`.

Each module has one provider; `batch` is what they all see of a step, `placement` puts costs of
several roles together.
"""
