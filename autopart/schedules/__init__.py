"""Pipeline schedules: build, search, check, put the communication in, predict time and memory."""

from autopart.schedules.auto import Found, auto
from autopart.schedules.build import build, names
from autopart.schedules.executable import check_executable, unpaired
from autopart.schedules.lower import lower
from autopart.schedules.simulate import Timeline, simulate
from autopart.schedules.slice_lengths import batch_and_slice_lengths, slice_lengths
from autopart.schedules.spell import make, spell
from autopart.schedules.text import read
from autopart.schedules.timing import Link
from autopart.schedules.validate import validate
from autopart.schedules.versions import Staleness, staleness, versions

__all__ = [
    "Found",
    "Link",
    "Staleness",
    "Timeline",
    "auto",
    "batch_and_slice_lengths",
    "build",
    "check_executable",
    "lower",
    "make",
    "names",
    "read",
    "simulate",
    "slice_lengths",
    "spell",
    "staleness",
    "unpaired",
    "validate",
    "versions",
]
