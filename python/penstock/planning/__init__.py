"""Plans how often to save: models of failures and saves, and advice from a store's history.

>>> from penstock.planning import Training, advise, cluster_of, given
>>> run = Training(stall=given(60, "s", "bench"), durable=given(60, "s", "bench"))
>>> advise(training=run, cluster=cluster_of(mtbf_seconds=3600)).interval.unit
's'
"""

from penstock.planning.advice import Advice
from penstock.planning.advise import advise
from penstock.planning.inputs import Cluster, Drives, Prices, Training, cluster_of
from penstock.planning.models.failures import mtbf, mtbf_counted
from penstock.planning.models.interval import (
    Shares,
    best_period,
    daly,
    ettr,
    goodput_first_order,
    rfo,
    save_cost,
    shares,
    shares_weibull,
    young,
)
from penstock.planning.models.levels import (
    Level,
    LevelPlan,
    copies_survive,
    drive_days,
    drive_writes_per_day,
    plan_levels,
)
from penstock.planning.models.quantity import Quantity, assumed, given, measured
from penstock.planning.records.job_log import JobLog, read_job_log

__all__ = [
    "Advice",
    "Cluster",
    "Drives",
    "JobLog",
    "Level",
    "LevelPlan",
    "Prices",
    "Quantity",
    "Shares",
    "Training",
    "advise",
    "assumed",
    "best_period",
    "cluster_of",
    "copies_survive",
    "daly",
    "drive_days",
    "drive_writes_per_day",
    "ettr",
    "given",
    "goodput_first_order",
    "measured",
    "mtbf",
    "mtbf_counted",
    "plan_levels",
    "read_job_log",
    "rfo",
    "save_cost",
    "shares",
    "shares_weibull",
    "young",
]
