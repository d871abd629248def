"""The real worker on a machine with simulated cards that compute: `python card_worker.py BYTES[,BYTES...]`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    from app.runtime import loop, view
    from tests.runtime.simulated import SimulatedMachine

    view.view, view.unusable = (
        dict,
        lambda *_: None,
    )  # it asks for the driver's names of the cards, and there is no driver
    with SimulatedMachine(gpus=[int(size) for size in sys.argv[1].split(",")]):
        loop.main()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
