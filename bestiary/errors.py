"""Errors that are shown to the user as one sentence, and errors that are shown with a traceback."""


class UserError(ValueError):
    """An error that the user can correct. The message says what is wrong and what would be right."""


class ProcessLost(Exception):
    """A process that the run needs has ended. The run can be resumed from its last checkpoint."""


EX_TEMPFAIL = 75  # exit code after `ProcessLost`: "temporary failure, try again" in sysexits.h
