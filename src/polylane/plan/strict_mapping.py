"""Strict mappings: the pydantic base of every mapping of a plan file; frozen, unknown keys are errors."""

from __future__ import annotations

from typing import Annotated

import pydantic


class StrictMapping(pydantic.BaseModel):
    """A mapping of a plan file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


# A positive integer. Strict: neither true nor "2" is accepted for a number.
Count = Annotated[int, pydantic.Field(strict=True, gt=0)]
