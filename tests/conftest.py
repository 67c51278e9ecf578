"""For all tests: programs can be interrupted, also where the tests run in the background.

A shell lets what it starts with ``&`` ignore Ctrl-C, and so would everything that is started here.
Devices do not measure themselves before each of the many nets; the tests of that let them.
"""

import os
import signal

os.environ["TERRAZZO_MEASURE"] = "off"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
