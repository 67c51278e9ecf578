"""For all tests: programs can be interrupted, also where the tests run in the background.

A shell lets what it starts with ``&`` ignore Ctrl-C, and so would everything that is started here.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
