"""`python -m app.runtime.simulate`: see `command.py`."""

from app.runtime.simulate.command import main

raise SystemExit(main())
