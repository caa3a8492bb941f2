"""Audit: some steps of a training are computed a second time as the user wrote them, and compared."""

from typing import Literal

# Whether steps are audited: at a bounded cost, at every step that is due, with no more than a warning, or not at all.
AuditMode = Literal["auto", "stop", "warn", "off"]
