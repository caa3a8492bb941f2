"""From a YAML file to a plain mapping, each of whose keys is there once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from polylane.errors import PolylaneError

# The parser in C is ten times as fast; not every build of PyYAML has it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class EachKeyOnce(_Loader):  # type: ignore[misc]
    """YAML in which no mapping has a key twice: of two values plain YAML keeps the last one, without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    raise PolylaneError(f"{key.value} is there twice, on lines {lines[name]} and {line}: keep one")
                lines[name] = line
        return super().construct_mapping(node, deep)


def parse(text: str) -> dict[Any, Any]:
    """The mapping that a YAML text is.

    Raises:
        PolylaneError: it is not YAML, empty or no mapping, or a key is there twice.
    """
    try:
        data = yaml.load(text, EachKeyOnce)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PolylaneError(f"this is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        raise PolylaneError("there is nothing in it")
    if not isinstance(data, dict):
        raise PolylaneError("this is not a mapping of keys and values")
    return data


def read(path: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Raises:
        PolylaneError: as :func:`parse`, or it cannot be read; naming the file.
    """
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PolylaneError(f"{path}: {error.strerror or error}") from error
    except (PolylaneError, UnicodeError) as error:
        raise PolylaneError(f"{path}: {error}") from error
