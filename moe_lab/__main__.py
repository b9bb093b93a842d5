"""`python -m moe_lab`."""

from moe_lab.cli import main

raise SystemExit(main())
