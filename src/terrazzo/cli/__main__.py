"""``python -m terrazzo.cli``: the command line without the installed script."""

import sys

from terrazzo.cli.main import main

sys.exit(main())
