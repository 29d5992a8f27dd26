"""What people see of an engine: its methods and properties in `dir`, and one line in `repr`."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

from medusa_kit.errors import ClosedError, Live

API = (
    "activations", "attention", "base", "cache", "close", "conversation", "drafter", "encode",
    "generate", "heads", "heads_source", "lossy_by", "own_drafter", "rounding_tolerance",
    "shared_batch", "steps_run_by", "stream", "tree", "use_tree", "weights",
)  # fmt: skip

AnyClosable = TypeVar("AnyClosable", bound="Closable")


def closable(cls: type[AnyClosable]) -> type[AnyClosable]:
    """A data class without its default values, which a closed object would still have."""
    for one in fields(cls):  # type: ignore[arg-type]
        if one.name in vars(cls):
            delattr(cls, one.name)
    return cls


class Closable(Live):
    """An object whose attributes are gone once it is closed, so that their memory is freed."""

    def close(self) -> None:
        """Let go of the model, so that its memory is free once nobody else has it. Later calls
        raise ClosedError. To be called when no answer is under way."""
        self.__dict__.clear()

    def __enter__(self) -> Self:
        if not self.__dict__:
            raise _closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # else every attribute would have a type

        def __getattr__(self, name: str) -> Any:
            if not self.__dict__ and name in type(self).__dataclass_fields__:
                raise _closed()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _closed() -> ClosedError:
    return ClosedError("this engine is closed", hint="load another")


def described(engine: Any) -> str:
    """An engine in a line."""
    if not engine.__dict__:
        return "Engine(closed)"
    info = engine.base.info
    heads = "no heads" if engine.heads is None else f"{engine.heads.num_heads} heads"
    return (
        f"Engine({info.name}, {info.dtype}, {info.device}, {heads}, drafter {engine.own_drafter})"
    )
