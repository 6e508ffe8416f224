"""`python -m headrace`, the same as the command `headrace`."""

import sys

from headrace.cli import main

sys.exit(main())
