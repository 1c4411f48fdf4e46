"""Two kinds of failure: a user's, told in one sentence, and ours, told with a traceback."""


class UserError(ValueError):
    """Something a user can mend. The message says what is wrong and what would be right."""


class Lost(Exception):
    """A process without which a run cannot go on is gone; the run can be continued from its last checkpoint."""


LOST = 75  # exit code that says so: "try again", in sysexits.h
