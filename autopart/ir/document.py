"""Documents: one piece of frozen data in a JSON file that says what it is and in which version of its schema."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from autopart.ir.codec import decode, encode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document(Generic[T]):
    """The file format of one type: the name under which a file holds it, and the version that this autopart reads."""

    kind: type[T]
    name: str
    version: int

    @property
    def schema(self) -> str:
        """What a file calls its schema."""
        return f"autopart.{self.name}"

    def to_json(self, value: T) -> str:
        """A value as JSON text."""
        data = {"schema": self.schema, "version": self.version, self.name: encode(value)}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    def from_json(self, text: str) -> T:
        """The value that `to_json` wrote; ValueError says what differs if the text is something else."""
        data = json.loads(text, parse_constant=self._refuse)
        if not isinstance(data, dict) or data.get("schema") != self.schema:
            raise ValueError(f"not a {self.name}: expected an object with schema {self.schema!r}")
        version = data.get("version")
        if version != self.version or isinstance(version, bool):
            raise ValueError(f"{self.name}: cannot read schema version {version!r}; this autopart reads {self.version}")
        if extra := sorted(set(data) - {"schema", "version", self.name}):
            raise ValueError(f"{self.name}: unknown field {', '.join(extra)}")
        value: T = decode(self.kind, data.get(self.name), self.name)
        return value

    def save(self, value: T, path: str | os.PathLike[str]) -> None:
        """Write a value to a JSON file."""
        Path(path).write_text(self.to_json(value), encoding="utf-8")

    def load(self, path: str | os.PathLike[str]) -> T:
        """Read a value from a JSON file; ValueError names the file and what is wrong with it."""
        try:
            return self.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _refuse(self, constant: str) -> float:
        raise ValueError(f"{self.name}: {constant} is not a number that a {self.name} can hold")
