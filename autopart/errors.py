"""The errors that autopart raises.

Bad arguments are ``ValueError`` or ``TypeError``; everything else that goes wrong derives from
:class:`AutopartError`. A message says what is wrong, where (the user's file and line; or rank, stage, microbatch,
action) and what to do about it.
"""


class AutopartError(Exception):
    """Base of every error that is not a bad argument."""


class CaptureError(AutopartError):
    """The module's call could not be turned into one graph whose parts may run apart."""


class PlanInfeasible(AutopartError):
    """No plan satisfies the request; the message names what binds and what would lift it.

    `core` has the fewest of the caller's pins that cannot be kept together, the memory limit last; `ways` the smallest
    single changes that make it feasible, each as an argument, tried before it was named. Both are in the message.
    """

    def __init__(self, message: str, core: tuple[str, ...] = (), ways: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.core, self.ways = core, ways


class VerificationError(AutopartError):
    """A program breaks one of the rules that every program must keep."""


class RankFailure(AutopartError):
    """A rank failed while the program ran; the message names rank, stage, microbatch, action and the user's line."""
