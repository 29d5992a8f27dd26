"""What `verify` found, as verify.json has it.

torch is not imported here, since reports are read where nothing is computed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from pydantic import AliasChoices, Field, TypeAdapter

from medusa_kit.bench.about import About
from medusa_kit.bench.agreement import Agreement

# Earlier versions wrote it as noise.
Tolerance = Annotated[float, Field(validation_alias=AliasChoices("rounding_tolerance", "noise"))]
LAYER_BY_LAYER = "transformers, layer by layer"  # a reference


@dataclass(frozen=True)
class Difference:
    """The first place where an answer differs from the oracle's."""

    prompt: int
    position: int  # in the answer, from 0
    expected: int | None
    actual: int | None
    margin: float  # infinite where one answer has ended
    rounding_tolerance: Tolerance

    @property
    def is_rounding(self) -> bool:
        return self.margin < self.rounding_tolerance


@dataclass(frozen=True)
class EncodingDifference:
    """The first place where a prompt's ids are not those of the independent encoding."""

    prompt: int
    position: int
    expected: list[int]  # what both go on with from there, a few ids
    actual: list[int]
    text: str  # what the prompt says up to there, its end


@dataclass(frozen=True)
class VerifyReport:
    num_prompts: int
    num_tokens: int
    differences: list[Difference]
    rounding_tolerance: Tolerance
    acceptance_length: float
    # The backend asked for, the one in use, and why they differ. Files of earlier versions lack
    # this and what follows.
    attention: dict[str, Any] = field(default_factory=dict)
    drafter: str | None = None
    reference: str = ""  # what answers were held against
    encodings: list[EncodingDifference] = field(default_factory=list)
    encoded_by: str | None = None  # what prompts were held against; None: nothing
    # Of rounded activations with the second model; None: of float32, or not measured.
    agreement: Agreement | None = None
    about: About = field(default_factory=About)

    @property
    def failed(self) -> bool:
        """Whether anything differs by more than rounding."""
        return bool(self.bugs or self.encodings)

    @property
    def bugs(self) -> list[Difference]:
        return [difference for difference in self.differences if not difference.is_rounding]

    @property
    def identical(self) -> int:
        return self.num_prompts - len(self.differences)

    def to_json(self) -> dict[str, Any]:
        own = asdict(self)
        del own["agreement"], own["about"]
        return {
            **own,
            "identical": self.identical,
            "bugs": len(self.bugs),
            "agreement_with_float32": self.agreement and self.agreement.to_json(),
            **self.about.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "VerifyReport":
        """TypeError or ValueError for what is no such report."""
        about = {name: value for name, value in record.items() if name not in OWN}
        found = {"agreement": record.get("agreement_with_float32"), **record, "about": about}
        return TypeAdapter(cls).validate_python(found)


OWN = {one.name for one in fields(VerifyReport)} | {"noise", "identical", "bugs",
                                                    "agreement_with_float32"}  # fmt: skip
