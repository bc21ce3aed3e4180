"""``python -m arbor`` is the command ``arbor``."""

import sys

from arbor.cli import main

sys.exit(main())
