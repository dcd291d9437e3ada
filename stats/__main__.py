"""`python -m stats`."""

import sys

from stats.cli import main

if __name__ == "__main__":
    sys.exit(main())
