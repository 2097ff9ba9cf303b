"""Pipeline schedules: build one by name, check it, put the communication in, predict its time and memory."""

from autopart.schedules.build import build, names
from autopart.schedules.lower import lower
from autopart.schedules.simulate import Timeline, simulate
from autopart.schedules.spell import make, spell
from autopart.schedules.text import read
from autopart.schedules.validate import validate

__all__ = ["Timeline", "build", "lower", "make", "names", "read", "simulate", "spell", "validate"]
