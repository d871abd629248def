"""Settings: flag > POCKETREEL_* environment > config.toml in the data folder > default. And where bundled files lie."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import platformdirs
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from app.errors import ConfigError
from app.plans import Stage
from app.value import GIB

_PACKAGE = Path(__file__).resolve().parent


@cache
def bundled(*parts: str) -> Path:
    """A file or folder that ships with the program: inside the wheel, or beside `app/` in a checkout."""
    packaged = _PACKAGE / "_bundled"
    return (packaged if packaged.is_dir() else _PACKAGE.parent).joinpath(*parts)


def default_data_dir() -> Path:
    """POCKETREEL_DATA_DIR, else the platform's folder for application data. All that the program keeps lies there."""
    chosen = os.environ.get("POCKETREEL_DATA_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(platformdirs.user_data_dir("pocketreel", appauthor=False))


def hub_folder() -> Path:
    """The Hub's cache, where downloaded models lie; as huggingface_hub finds it, without importing it."""
    variables = os.environ
    home = Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE")
    return (Path(cache) if cache else Path(variables.get("HF_HOME") or home) / "hub").expanduser()


LOCAL_OWNER = "local"
"""Who works at this machine itself: the command line, and the page when it is asked from the loopback address."""


class Settings(BaseSettings):
    """What can be set. Every field is also a key of config.toml and, in capitals, a POCKETREEL_* variable."""

    model_config = SettingsConfigDict(env_prefix="POCKETREEL_", env_ignore_empty=True, extra="forbid", frozen=True)

    data_dir: Path = Field(default_factory=default_data_dir)
    host: str = "127.0.0.1"
    port: int = Field(7860, ge=0, le=65535)
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Further names that the page may be asked for by: a proxy, a router, a container. Commas between them."""
    worker_idle_seconds: float = Field(900.0, ge=0)
    """A warm worker that long without a job gives its memory back."""
    cancel_grace_seconds: float = Field(0.7, ge=0)
    """How long a cancel waits for the run to stop by itself before the worker's process group is ended."""
    log_files_kept: int = Field(20, ge=1)
    resume_by_itself: bool = False
    """After a crash or a power cut the page takes up again what had not ended, and a worker that crashed is replaced
    once; otherwise there is a button for it, and `pocketreel resume`."""
    checkpoint_quota_bytes: int = Field(8 * GIB, ge=0)
    """Of all that unfinished jobs keep to be resumed from; 0: nothing is kept."""
    checkpoint_days: float = Field(14.0, ge=0)
    """What nobody has resumed by then is removed."""
    checkpoint_seconds: float | None = Field(None, ge=0)
    """Between two writings; None: a minute or 5 % of the run, whichever is less."""
    stall_seconds: float = Field(600.0, gt=0)
    """A run in which nothing moves for so long, and for 20 usual steps, hangs: it is stopped, with the likely cause."""
    stage_timeout_seconds: dict[Stage, float] = Field(default_factory=dict)
    """Time limits of single stages, e.g. `decode = 600`; the job's own limit holds beside them."""
    ram_floor_bytes: int = Field(200 * 2**20, ge=0)
    """With less RAM available in the whole system a run is stopped, before the system picks a program to end."""
    worker_max_jobs: int = Field(100, ge=1)
    """A worker is replaced after so many jobs, or when it has grown by `worker_growth_bytes` since its first."""
    worker_growth_bytes: int = Field(2 * GIB, ge=0)

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()  # a compose file or a service expands no ~

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - fixed signature; a .env in a working folder must not count
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = default_data_dir() / "config.toml"
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=toml))

    @property
    def database(self) -> Path:
        return self.data_dir / "pocketreel.sqlite3"

    @property
    def outputs(self) -> Path:
        return self.data_dir / "outputs"

    @property
    def logs(self) -> Path:
        return self.data_dir / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.data_dir / "checkpoints"

    @property
    def locks(self) -> Path:
        return self.data_dir / "locks"

    @property
    def user_presets(self) -> Path:
        """A person's own models/*.toml and hardware/*.toml, beside the ones that ship."""
        return self.data_dir / "presets"


def load_settings(**flags: Any) -> Settings:
    """Settings with the given flags on top (None = not given).

    Raises:
        ConfigError: a value is wrong; names where it came from and what is allowed.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise ConfigError(
            f"A setting is wrong: {problems}. Settings come from flags, POCKETREEL_* variables and "
            f"{default_data_dir() / 'config.toml'}, in this order."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{default_data_dir() / 'config.toml'} cannot be read: {error}. Correct or delete it."
        ) from None
