"""What `model` and LoRAX's adapter fields stand for, and the list of /v1/models."""

from pathlib import Path

import pytest
from support.small_engines import build_engine, random_heads
from support.tiny_models import tiny_base

from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.errors import ConfigError, UnknownModelError
from medusa_kit.heads import save_heads
from medusa_kit.serve.models import RequestedModel, ServedModels, base_name
from medusa_kit.serve.service import Service
from medusa_kit.settings.serve import ServeConfig

BASE = tiny_base("llama")
HUB = "org/heads"


def served(store: HeadsStore | None, *names: str) -> ServedModels:
    engine = build_engine(BASE, heads=random_heads(BASE))
    return ServedModels(engine, names or ("base", "base:v2", "org/base"), store, 17)


def store_in(root: Path) -> HeadsStore:
    save_heads(random_heads(BASE, 2), root / "few")
    return HeadsStore(build_engine(BASE), root, [HUB])


def test_a_model_is_a_base_or_a_base_with_heads(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        models = served(store)
        for asked, name, heads in (
            ("base", "base", None),
            ("org/base", "org/base", None),
            ("base:few", "base:few", "few"),
            ("base:v2", "base:v2", None),
            ("base:v2:few", "base:v2:few", "few"),
            (f"base:{HUB}", f"base:{HUB}", HUB),
            (None, "base", None),
        ):
            assert models.requested(asked) == RequestedModel(name, heads)
        for unknown in ("", "bass", "base:", "few", ":few", "Base:few", "x" * 10_000):
            with pytest.raises(UnknownModelError, match="is not served here") as caught:
                models.requested(unknown)
            assert len(str(caught.value)) < 300
        assert models.options("base") == {}
        assert models.options("base:few")["heads"].name == "few"
        for unknown in ("base:fewer", "base:../few", "base:org/others"):
            with pytest.raises(UnknownModelError, match="there are no heads"):
                models.options(unknown)
    with pytest.raises(UnknownModelError, match="requests may name none"):
        served(None).requested("base:few")


def test_the_server_has_the_names_it_is_given_and_its_own() -> None:
    own = base_name(BASE.info)
    given = ["gpt-4", "chat", own, "chat"]
    service = Service(build_engine(BASE), ServeConfig(served_model_name=given))
    try:
        names = service.names
        assert [one["id"] for one in names.entries()] == ["gpt-4"]
        for name in given:
            assert names.requested(name, None, None) == RequestedModel(name)
            assert names.entry(name)["id"] == "gpt-4"
        with pytest.raises(UnknownModelError, match="expected gpt-4"):
            names.requested("gpt-5", None, None)
    finally:
        service.close(drain=False)


def test_loraxs_fields_name_heads(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        models = served(store)
        few = RequestedModel("base:few", "few")
        assert models.requested("base", "few") == few
        assert models.requested(None, "few", "local") == few
        assert models.requested("base:few", "few") == few
        assert models.requested("base", HUB, "hub").heads == HUB
        for given, message in (
            (("base:few", "other"), "name different heads"),
            (("base", None, "hub"), "without an adapter_id"),
            (("base", "few", "s3"), "adapter_source 's3' is unknown"),
        ):
            with pytest.raises(ConfigError, match=message):
                models.requested(*given)
        for source, name in (("hub", "few"), ("local", HUB)):
            with pytest.raises(UnknownModelError, match=f"from {source} here"):
                models.requested("base", name, source)


def test_the_list_tells_what_is_loaded(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        models = served(store)
        base, few, hub = models.entries()
        assert models.listed() == ["base", "base:few", f"base:{HUB}"]
        assert {(one["object"], one["created"]) for one in (base, few, hub)} == {("model", 17)}
        assert (base["medusa_kit"]["kind"], base["medusa_kit"]["num_heads"]) == ("medusa", 3)
        assert few["medusa_kit"] == {
            "state": "available", "heads": "few", "kind": "medusa", "num_heads": 2, "bytes": 0,
            "in_use": False,
        }  # fmt: skip
        assert (hub["medusa_kit"]["state"], hub["medusa_kit"]["kind"]) == ("available", None)
        with store.get("few"):
            told = models.entry("org/base:few")["medusa_kit"]
            assert (told["state"], told["in_use"]) == ("loaded", True)
            assert told["bytes"] == store.num_bytes
        assert models.entry("org/base") == base
        for unknown in ("base:other", "other"):
            with pytest.raises(UnknownModelError):
                models.entry(unknown)


def test_the_heads_of_the_server_may_be_named(tmp_path: Path) -> None:
    """As /v1/models and `usage` call them."""
    save_heads(random_heads(BASE), tmp_path / "own")
    engine = build_engine(BASE, heads=tmp_path / "own")
    alone = ServedModels(engine, ["base"], None, 17)
    (entry,) = alone.entries()
    assert entry["medusa_kit"]["heads"] == "own"
    assert alone.requested("base:own") == RequestedModel("base:own")
    assert alone.requested("base", "own") == RequestedModel("base:own")
    assert alone.options("base:own") == {}
    assert alone.entry("base:own") == entry
    with pytest.raises(UnknownModelError) as caught:
        alone.requested("other")
    assert ":HEADS" not in str(caught.value)
    with pytest.raises(UnknownModelError):
        alone.requested("base:other")
    with store_in(tmp_path) as store:  # whose own come first
        beside = ServedModels(engine, ["base"], store, 17)
        assert beside.requested("base:own").heads == "own"
        with pytest.raises(UnknownModelError, match="or base:HEADS"):
            beside.requested("other")


def test_a_name_is_shown_to_its_hundredth_character() -> None:
    for name, said in (("y" * 100, f"'{'y' * 100}' is"), ("y" * 101, f"'{'y' * 100}'… is")):
        with pytest.raises(UnknownModelError, match=said):
            served(None).requested(name)
