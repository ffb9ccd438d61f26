"""Lets the tests import the scripts, and gives them two virtual CPU devices to share work between."""

import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
