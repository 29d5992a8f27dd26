"""Models that have a name of their own: found in the cache folder, or what brings them there."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from threading import Event, Timer

import pytest
from support.gguf.tiny_gguf import write_gguf

from medusa_kit.base import own_models
from medusa_kit.base.files import gguf_source, lasting_name, resolve, stored_quantised
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.own_models import FETCHED_MODELS, FetchedModel
from medusa_kit.bench.independent_encoding import kept_encodings
from medusa_kit.errors import CheckpointError
from medusa_kit.heads.convert import _loadable_name
from medusa_kit.hub.card import KNOWN_BASES
from medusa_kit.serve.models import base_name
from medusa_kit.settings.engine import FETCHED_NAMES, OWN_MODELS
from medusa_kit.settings.engine_file import _model_path
from medusa_kit.store import records
from medusa_kit.store.records import content_digest

pytest.importorskip("gguf")
LARGE, SMALL = FETCHED_NAMES


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FetchedModel:
    """A tiny file in the place of the real one."""
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    model = FetchedModel(SMALL, FETCHED_MODELS[SMALL].base, len(content), digest)
    monkeypatch.setitem(FETCHED_MODELS, SMALL, model)
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(content)
    return model


def test_names_are_those_of_the_options() -> None:
    assert tuple(FETCHED_MODELS) == FETCHED_NAMES
    assert set(FETCHED_NAMES) < set(OWN_MODELS)
    assert {name: KNOWN_BASES[name] for name in FETCHED_NAMES} == {
        LARGE: "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        SMALL: "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    }


def test_a_digest_that_was_begun_is_made_once(
    fetched: FetchedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_end, begun = list[Path](), Event(), Event()
    digest = records.file_digest

    def slow(path: Path) -> str:
        read.append(path)
        begun.set()
        assert may_end.wait(60)
        return digest(path)

    monkeypatch.setattr(records, "SETTLED_SECONDS", -60)
    monkeypatch.setattr(records, "file_digest", slow)
    own_models.begin_digest(SMALL)
    assert begun.wait(60)
    Timer(0.2, may_end.set).start()
    assert own_models.own_gguf(SMALL) == fetched.path
    own_models.begin_digest(str(tmp_path / "tiny.gguf"))
    assert content_digest(tmp_path / "tiny.gguf") == fetched.sha256
    assert read == [fetched.path, tmp_path / "tiny.gguf"]


@pytest.mark.parametrize("name", ["missing.gguf", LARGE, "org/name", ".", "debug-tiny"])
def test_no_digest_is_begun_of_what_is_no_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_models, "in_background", pytest.fail)
    own_models.begin_digest(name)


def test_a_name_is_a_model_everywhere(fetched: FetchedModel, tmp_path: Path) -> None:
    """Though heads for it lie in a folder of the same name."""
    (tmp_path / SMALL).mkdir()
    base = load_base_model(SMALL, device="cpu")
    assert (base.info.name, base.info.source) == (SMALL, "embedded")
    assert base_name(base.info) == SMALL
    assert gguf_source(SMALL) == fetched.path
    assert lasting_name(SMALL, base.info.source) == SMALL
    assert stored_quantised(SMALL) == "a quantised GGUF file"
    assert _model_path(SMALL, tmp_path) == SMALL
    assert _loadable_name(base, None) == resolve(SMALL)[1]  # type: ignore[arg-type]
    assert kept_encodings(base) == {}


def test_an_absent_model_says_what_brings_it() -> None:
    for call in (resolve, gguf_source, load_base_model):
        with pytest.raises(CheckpointError, match=f"'{LARGE}' is not on this machine") as caught:
            call(LARGE)
        assert "`make model` fetches it" in str(caught.value.hint)
        assert "`make model MODEL_FILE=FILE`" in str(caught.value.hint)
    with pytest.raises(CheckpointError) as caught:
        resolve(SMALL)
    assert f"`make model MODEL={SMALL}`" in str(caught.value.hint)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1] + b"x", lambda raw: raw[:-9]])
def test_another_file_in_its_place_is_refused(
    fetched: FetchedModel, damage: Callable[[bytes], bytes]
) -> None:
    fetched.path.write_bytes(damage(fetched.path.read_bytes()))
    with pytest.raises(CheckpointError, match="its SHA-256 is another") as caught:
        resolve(SMALL)
    assert "fetches it again" in str(caught.value.hint)


def test_a_name_in_other_letters_is_a_mistake() -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve("Qwen2.5-Coder-1.5B-instruct")
    assert caught.value.hint == f"did you mean {LARGE}?"


def test_where_the_file_lies(cache: Path) -> None:
    model = FETCHED_MODELS[LARGE]
    assert model.path == cache / own_models.FOLDER / LARGE / f"{LARGE}-q4_k_m.gguf"


def test_only_a_file_of_which_nothing_is_kept_is_prepared_for(
    fetched: FetchedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, imported = list[str](), list[str]()
    monkeypatch.setattr(own_models, "begin_digest", begun.append)
    monkeypatch.setattr(own_models, "import_module", imported.append)
    for name in (SMALL, "org/name"):
        own_models.prepare_first_start(name)
    assert (begun, imported) == ([SMALL, "org/name"], ["transformers.modeling_utils"])
    resolve(SMALL, weights=False)
    own_models.prepare_first_start(SMALL)
    assert (len(begun), len(imported)) == (3, 1)
