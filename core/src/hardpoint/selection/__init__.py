"""One selector for every family, and the plans, tables and explanations it answers with."""

from hardpoint.selection.plan import Plan, PlanEntry, Rejection, StepRange
from hardpoint.selection.platform_choice import PlatformChoice, choose_platform, preset_choice
from hardpoint.selection.selector import Selector
from hardpoint.selection.settings import Choice, Settings
from hardpoint.selection.table import Row, SelectionTable
from hardpoint.selection.tuning import TuningFile, Verdict

__all__ = [
    "Choice",
    "Plan",
    "PlanEntry",
    "PlatformChoice",
    "Rejection",
    "Row",
    "SelectionTable",
    "Selector",
    "Settings",
    "StepRange",
    "TuningFile",
    "Verdict",
    "choose_platform",
    "preset_choice",
]
