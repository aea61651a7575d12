"""The base of every body: exact types, and no field that is ignored."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from peagle.server.errors import ApiError, as_unicode, shown


class Body(BaseModel):
    """A JSON object with known fields of exact types; null stands for a field left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})

    @model_validator(mode="before")
    @classmethod
    def _refuse_not_supported(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, harmless in cls.not_supported.items():
            value = values.get(name)
            if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
                raise ApiError(
                    400, f"{name} is {shown(value)}: not supported, leave it out", param=name, code="unsupported_field"
                )
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {name: value for name, value in values.items() if name in known}
        unknown = next((name for name in values if name not in kept and name not in cls.not_supported), None)
        # One of them is enough to be refused: half a million would keep everybody waiting for seconds.
        return kept if unknown is None else {**kept, as_unicode(unknown): None}
