"""`python -m tests.real_weights ENGINE`: see campaign.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from real_weights.campaign import main

sys.exit(main())
