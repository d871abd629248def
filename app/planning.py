"""`pocketreel plan`: plans for this machine or an imagined one, without submitting anything."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from app import calibration, hardware, planner, presets
from app.config import Settings
from app.errors import InvalidRequest, ModelNotUsable, PlanError, StoreError
from app.planner.imagine import imagine
from app.planner.table import Cliff, FitRow, cliffs, fit_table
from app.resolve import resolve
from app.schema import Coefficients, Draft, Hardware, HardwarePreset, Learned, ModelCard, Notice, Plan, Request, Value
from app.store import Store

_log = logging.getLogger(__name__)
_PROMPT = "a red ball"
"""Any prompt: plans reckon with the longest one anyway."""


class Asked(Value):
    """What `pocketreel plan` was asked for. Sizes are text as typed: `8GiB`."""

    model: str = "built-in"
    preset: str = "auto"
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    vram: str | None = None
    ram: str | None = None
    gpus: str | None = None
    """Several cards: `6GiB,12GiB`."""


class Outlook(Value):
    """A plan for a request, or why there is none."""

    request: Request
    notices: tuple[Notice, ...]
    title: str
    plan: Plan | None
    error: str | None = None
    """Why there is no plan."""
    runs: bool
    """False: it starts from a picture, which this version cannot take."""

    @property
    def runs_words(self) -> str:
        """For people, where it does not run."""
        if self.runs:
            return ""
        return f"{self.title} needs a start image, which this version cannot take: it is planned only."


class Planning:
    """The catalogue and the machine, probed once."""

    def __init__(self, settings: Settings, asked: Asked) -> None:
        """Probe the machine and read the catalogue.

        Raises:
            InvalidRequest: a size that is none, an unknown preset.
            PresetError: a bundled preset is broken.
        """
        self.asked, self._settings = asked, settings
        self._known: dict[str, Learned | None] = {}
        self._imagined = bool(asked.vram or asked.gpus or asked.ram)
        self.catalogue = presets.load_catalogue(settings)
        self.preset: HardwarePreset = presets.find_hardware(self.catalogue, asked.preset)
        found = hardware.probe(settings)
        if asked.vram is not None and asked.gpus is not None:
            raise InvalidRequest("Give --vram for one card or --gpus for several, not both.", field="vram")
        cards = asked.gpus or asked.vram
        self.hardware: Hardware = imagine(
            found,
            vram=[_size("gpus" if asked.gpus else "vram", part) for part in cards.split(",")] if cards else [],
            ram_bytes=_size("ram", asked.ram) if asked.ram is not None else None,
        )

    def outlook(self) -> Outlook:
        """The plan for one model.

        Raises:
            BadInput: something asked for is wrong.
        """
        card = presets.as_stored(presets.find_card(self.catalogue, self.asked.model))
        request, notices = self._request(card)
        plan, error = self._plan(card, request, presets.tensor_counts(card), self._learned(card))
        return Outlook(
            request=request,
            notices=tuple(notice for notice in notices if notice.field != "prompt"),
            title=card.title,
            plan=plan,
            error=error,
            runs="t2v" in card.tasks,
        )

    def _learned(self, card: ModelCard) -> Learned | None:
        """Of an imagined machine nothing is known, nor where the history cannot be read: a plan needs none."""
        if card.coefficients is None or self._imagined:
            return None
        if card.coefficients.fingerprint not in self._known:
            self._known[card.coefficients.fingerprint] = self._read_learned(card.coefficients)
        return self._known[card.coefficients.fingerprint]

    def _read_learned(self, coefficients: Coefficients) -> Learned | None:
        try:
            store = Store(self._settings.database)
        except StoreError as error:
            _log.warning("planning without what earlier runs taught: %s", error)
            return None
        try:
            return calibration.learned(store, coefficients, calibration.machine_key(self.hardware))
        finally:
            store.close()

    def table(self) -> tuple[FitRow, ...]:
        """Every model of the catalogue."""
        cards = []
        for card in self.catalogue.models.values():
            try:
                cards.append(presets.as_stored(card))
            except ModelNotUsable as error:  # one damaged file must not hide all other models
                _log.warning("left out of the table: %s: %s", card.id, error)
        return fit_table(self.hardware, [(card, self._request(card)[0]) for card in cards], self.preset, self._learned)

    def cliffs(self) -> tuple[str, tuple[Cliff, ...]]:
        """The model's title and its cliffs.

        Raises:
            BadInput: something asked for is wrong.
            PlanError: the model was not measured by the simulator.
        """
        card = presets.as_stored(presets.find_card(self.catalogue, self.asked.model))
        return card.title, cliffs(self.hardware, card, self._request(card)[0], self.preset, self._learned(card))

    def _request(self, card: ModelCard) -> tuple[Request, Sequence[Notice]]:
        asked = self.asked
        draft = Draft(
            model=card.id,
            preset=self.preset.id,
            prompt=_PROMPT,
            width=asked.width,
            height=asked.height,
            num_frames=asked.num_frames,
            num_inference_steps=asked.num_inference_steps,
            seed=0,
        )
        # a model that starts from a picture is planned too, although this version refuses to run it
        return resolve(draft, card.model_copy(update={"tasks": ("t2v",)}), self.preset)

    def _plan(
        self,
        card: ModelCard,
        request: Request,
        counts: dict[str, dict[str, int]] | None,
        learned: Learned | None,
    ) -> tuple[Plan | None, str | None]:
        try:
            plan = planner.plan(
                self.hardware,
                card,
                request,
                self.preset,
                counts,
                learned=learned,
                presets=self.catalogue.hardware.values(),
            )
        except PlanError as error:
            return None, str(error)
        return plan, None


def simulator_names(settings: Settings) -> dict[str, str]:
    """By card id what the simulator calls the model: a name of its own catalogue, or the path of the folder."""
    cards = presets.load_catalogue(settings).models.values()
    return {card.id: card.simulated_as or str(card.folder) for card in cards if card.simulated_as or card.folder}


def _size(field: str, text: str) -> int:
    try:
        return presets.parse_bytes(text)
    except ValueError as error:
        raise InvalidRequest(f"--{field}: {error}.", field=field) from None
