"""The one exception a user ever sees, and what it says of those of others."""


class PeagleError(Exception):
    """A problem the user can fix: the message names the value, what was expected and the remedy, on one line.

    The CLI prints it without a stack trace and exits with status 2; the server maps it to HTTP 400.
    """


class Unavailable(PeagleError):
    """What a request asks cannot be had now; the server maps it to HTTP 503, for the request is not wrong."""


class NoMemory(Unavailable):
    """Memory for what a request asks is not there now."""


def one_line(error: BaseException) -> str:
    """What an exception of others says, on one line of at most 200 characters; its class where it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host. By name: torch's own class would have to be imported."""
    on_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_host or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
