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
    """No plan satisfies the request; the message names what binds and what would lift it."""


class VerificationError(AutopartError):
    """A program breaks one of the rules that every program must keep."""


class RankFailure(AutopartError):
    """A rank failed while the program ran; the message names rank, stage, microbatch, action and the user's line."""
