"""`python -m heart_attention.cli` is the command `heart`."""

import sys

from .main import main

sys.exit(main())
