"""Pipeline schedules: build, search, check, put the communication in, predict time and memory."""

from autopart.schedules.auto import Found, auto
from autopart.schedules.build import build, names
from autopart.schedules.lower import lower
from autopart.schedules.simulate import Timeline, simulate
from autopart.schedules.text import read
from autopart.schedules.validate import validate

__all__ = ["Found", "Timeline", "auto", "build", "lower", "names", "read", "simulate", "validate"]
