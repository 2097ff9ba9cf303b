"""Documents: one piece of frozen data in a JSON file that says what it is and in which version of its schema."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from autopart.ir.codec import decode, encode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document(Generic[T]):
    """The file format of one type: the name under which a file holds it, and the version that this autopart reads.

    A `sealed` one has a digest of each field, so that a file that was changed after it was written is refused with the
    fields that differ: its numbers follow from each other, and nothing would tell otherwise.
    """

    kind: type[T]
    name: str
    version: int
    sealed: bool = False

    @property
    def schema(self) -> str:
        """What a file calls its schema."""
        return f"autopart.{self.name}"

    def to_json(self, value: T) -> str:
        """A value as JSON text."""
        data = {"schema": self.schema, "version": self.version, self.name: encode(value)}
        if self.sealed:
            data["digests"] = _digests(data[self.name])
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    def from_json(self, text: str) -> T:
        """The value that `to_json` wrote; ValueError says what differs if the text is something else."""
        data = json.loads(text, parse_constant=self._refuse)
        if not isinstance(data, dict) or data.get("schema") != self.schema:
            raise ValueError(f"not a {self.name}: expected an object with schema {self.schema!r}")
        version = data.get("version")
        if version != self.version or isinstance(version, bool):
            raise ValueError(f"{self.name}: cannot read schema version {version!r}; this autopart reads {self.version}")
        seal = {"digests"} if self.sealed else set()
        if extra := sorted(set(data) - {"schema", "version", self.name} - seal):
            raise ValueError(f"{self.name}: unknown field {', '.join(extra)}")
        value: T = decode(self.kind, data.get(self.name), self.name)
        if self.sealed:
            self._check(data.get("digests"), _digests(data[self.name]))
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

    def _check(self, written: object, found: dict[str, str]) -> None:
        """Refuse fields that are not as they were written."""
        known = written if isinstance(written, dict) else {}
        if changed := [field for field in dict.fromkeys((*found, *known)) if known.get(field) != found.get(field)]:
            raise ValueError(
                f"{self.name}: changed since it was written: {', '.join(changed)}; to change a {self.name}, use "
                "dataclasses.replace on what is loaded, and save that"
            )

    def _refuse(self, constant: str) -> float:
        raise ValueError(f"{self.name}: {constant} is not a number that a {self.name} can hold")


def _digests(data: dict[str, Any]) -> dict[str, str]:
    """A digest of each field of encoded data, and of those of a field that is an object, by name."""
    flat = {
        f"{name}.{part}" if part else name: item
        for name, value in data.items()
        for part, item in (value.items() if isinstance(value, dict) else [("", value)])
    }
    texts = {name: json.dumps(item, sort_keys=True, allow_nan=False) for name, item in flat.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}
