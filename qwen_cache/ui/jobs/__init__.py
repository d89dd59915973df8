"""Commands as jobs: processes that outlive the UI, a queue over the devices of this machine, and short checks."""

from qwen_cache.ui.jobs.checks import Checked, Checks
from qwen_cache.ui.jobs.command import Command
from qwen_cache.ui.jobs.job import Job, NoJobError, Output
from qwen_cache.ui.jobs.queue import Queue

__all__ = ["Checked", "Checks", "Command", "Job", "NoJobError", "Output", "Queue"]
