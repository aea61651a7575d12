"""The one exception a user ever sees."""


class PeagleError(Exception):
    """A problem the user can fix: the message names the value, what was expected and the remedy, on one line.

    The CLI prints it without a stack trace and exits with status 2; the server maps it to HTTP 400.
    """
