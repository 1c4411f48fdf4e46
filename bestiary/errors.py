"""Two kinds of failure: a user's, told in one sentence, and ours, told with a traceback."""


class UserError(ValueError):
    """Something a user can mend. The message says what is wrong and what would be right."""
