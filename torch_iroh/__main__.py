"""`python -m torch_iroh VERB ...`."""

import sys

from torch_iroh._cli import main

sys.exit(main())
