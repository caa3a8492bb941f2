"""What every mapping of a plan file is: frozen, and without keys that nobody knows."""

from __future__ import annotations

from typing import Annotated

import pydantic


class StrictMapping(pydantic.BaseModel):
    """A mapping of a plan file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


# What counts something; true is no number here, nor is "2".
Count = Annotated[int, pydantic.Field(strict=True, gt=0)]
