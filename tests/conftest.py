"""What all tests need of their process."""

import signal

# A job in the background ignores Ctrl-C, and so would every process that a test starts to send it one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
