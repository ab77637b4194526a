"""`python -m symm_cp` is `symm-cp`."""

import sys

from symm_cp.cli import main

if __name__ == "__main__":
    sys.exit(main())
