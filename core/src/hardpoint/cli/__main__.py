"""``python -m hardpoint.cli``."""

from hardpoint.cli.main import main

main()
