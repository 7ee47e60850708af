"""The places of parts that are cut at each call, which a kernel of their own finds before it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import driver
from mpishare.plans.exchange.cuda.records import SLIDE_OPTION, SLIDE_RECORD
from mpishare.plans.gpu.launch import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.gpu.launch import PlanLauncher
    from mpishare.plans.rings import Slide

_THREADS = 128
_AS_THEY_ARE = "length", "wanted", "first", "extent", "shift", "is_source"


class Slides:
    """The parts of a plan that slide: a table of places for each, one for all launches."""

    def __init__(self, launcher: PlanLauncher) -> None:
        self._launcher = launcher
        self._places: dict[tuple[Slide, int], int] = {}
        self._words: Any = None
        self._launch: driver.Launch | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def places_of(self, slide: Slide, room: int) -> int:
        known = slide, room
        if known not in self._places:
            self._places[known] = self._launcher.zeros(8 * room)
        return self._places[known]

    def prepare(self, nshifts: int) -> None:
        """Prepare the launch, once all parts are known and before the tables are loaded."""
        if not self._places:
            return
        records = np.zeros(len(self._places), SLIDE_RECORD)
        for record, ((slide, room), places) in zip(records, self._places.items(), strict=True):
            for name in _AS_THEY_ARE:
                record[name] = getattr(slide, name)
            record["start"] = slide.start % slide.length
            record["room"], record["places"] = room, places
        options = f"-DNSHIFTS={nshifts}", SLIDE_OPTION
        path = Path(__file__).with_name("slides.cu")
        function = kernel(path, "slides", options, self._launcher.device)
        self._words = (ctypes.c_int64 * (3 * nshifts))()
        arguments = [self._words, self._launcher.upload(records)]
        self._launch = driver.Launch(
            function, len(records), _THREADS, arguments, self._launcher.where
        )

    def enqueue(self, stream: int, shifts: Sequence[Any]) -> None:
        """Find the places for the numbers of a call: each an int, or a place in GPU memory."""
        if self._launch is None:
            return
        for at, each in enumerate(shifts):
            self._words[3 * at : 3 * at + 3] = (
                (each, 0, 0) if isinstance(each, int) else (0, each.address, each.nbytes)
            )
        self._launch.enqueue(stream)
