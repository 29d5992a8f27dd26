"""Paths are resolved in one place, and no command replaces what medusa-kit did not write."""

import json
from pathlib import Path

import pytest
from support.typed import typed_command

import medusa_kit
from medusa_kit.errors import ConfigError
from medusa_kit.outputs import check_file, check_folder, has_keys, is_picture
from medusa_kit.paths import beside, expanded, whole

PACKAGE = Path(medusa_kit.__file__).parent


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty home folder, and a working folder beside it."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_no_other_module_writes_home_folders_out():
    asked = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
             if "expanduser" in path.read_text(encoding="utf-8")]  # fmt: skip
    assert asked == ["paths.py"]


def test_paths_are_whole_where_they_are_found(home, tmp_path):
    (home / "rows.jsonl").write_text("")
    Path("here").mkdir()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/here").mkdir()
    assert expanded("~/rows.jsonl") == home / "rows.jsonl"
    assert whole("here") == tmp_path / "work/here"
    assert beside("~/rows.jsonl") == str(home / "rows.jsonl")
    assert beside("~/gone") == str(home / "gone")
    assert beside("here") == str(tmp_path / "work/here")
    assert beside("here", tmp_path / "recipes") == str(tmp_path / "recipes/here")
    assert beside("here:train") == f"{tmp_path}/work/here:train"
    assert beside("owner/name") == "owner/name"
    assert beside("") == ""
    with pytest.raises(ConfigError, match="home folder that is not known") as caught:
        expanded("~nobody-has-this-name/x")
    assert caught.value.hint


COMMANDS = {
    "tree-search": ["tree-search", "-m", "debug-tiny", "--heads", "untrained", "--prompts",
                    "p.jsonl", "--output=OUT"],
    "bench": ["bench", "-m", "debug-tiny", "--prompts", "p.jsonl", "--output=OUT"],
    "verify": ["verify", "-m", "debug-tiny", "--prompts", "p.jsonl", "--output=OUT"],
    "data": ["data", "generate", "-m", "debug-tiny", "p.jsonl", "--output=OUT"],
    "server": ["data", "generate", "-m", "debug-tiny", "p.jsonl", "--output=OUT",
               "--endpoint", "http://127.0.0.1:9"],
    "quick": ["train", "--quick", "-m", "debug-tiny", "--prompts", "p.jsonl", "--output=OUT"],
    "fresh": ["train", "--quick", "-m", "debug-tiny", "--prompts", "p.jsonl", "--output=OUT",
              "--fresh"],
}  # fmt: skip
JSON_OF_MINE = json.dumps({"mine": 1})
TREE_OF_MINE = '{"format": "medusa-kit-tree", "version": 1, "choices": [[0]]}'
FOUND = '{"format": "medusa-kit-tree", "version": 1, "choices": [[0]], "table": []}'
TAKEN = [
    ("tree-search", "~/out", {"out/tree.json": "[[0], [0, 0]]"}),
    ("tree-search", "~/out", {"out/tree.json": TREE_OF_MINE}),
    ("tree-search", "~/out", {"out/statistics.npz": "mine"}),
    ("tree-search", "~/out", {"out/tree.json": FOUND, "out/tree.png": "mine"}),
    ("tree-search", "~/out", {"out/tree.png": "mine"}),
    ("tree-search", "~/out", {"out/calibration_answers.jsonl": "mine\n"}),
    ("bench", "~/out", {"out/bench.json": JSON_OF_MINE}),
    ("bench", "~/out", {"out/bench.png": "mine"}),
    ("bench", "~/out", {"out/bench.json": '{"methods": []}', "out/bench.png": "mine"}),
    ("verify", "~/mine.txt", {"mine.txt": "mine"}),
    ("verify", "~/mine.json", {"mine.json": JSON_OF_MINE}),
    ("data", "~/a.jsonl", {"a.jsonl": "mine\n"}),
    ("server", "~/a.jsonl", {"a.jsonl": "mine\n"}),
    ("data", "~/a.jsonl", {"a.jsonl.meta.json": JSON_OF_MINE}),
    ("quick", "~/out", {"out/notes.txt": "mine"}),
    ("fresh", "~/out", {"out/quick.json": JSON_OF_MINE, "out/answers.jsonl": "mine"}),
    ("fresh", "~/out", {"out/quick.json": "mine", "out/run/mine": "mine"}),
    *[(name, "~/file/out", {"file": "mine"}) for name in COMMANDS],
]


@pytest.mark.parametrize(("name", "output", "files"), TAKEN, ids=lambda value: str(value)[:30])
def test_what_is_a_persons_own_is_refused_before_anything_is_loaded(
    home, monkeypatch, capsys, name, output, files
):
    """`~` is written out too: a shell leaves it alone behind `=`."""

    def load(*_, **__):
        raise AssertionError("a model was loaded")

    for module in ("base.loading", "infer.cpu.packed_base"):  # what loads looks the name up first
        monkeypatch.setattr(f"medusa_kit.{module}.resolve", load)
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(40)))
    for path, text in files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    command = [word.replace("OUT", output) for word in COMMANDS[name]]
    code, _, said = typed_command(monkeypatch, capsys)(*command)
    assert code in (1, 2)
    assert "error:" in said
    assert "hint:" in said
    assert sorted(Path().iterdir()) == [Path("p.jsonl")]
    found = {path.relative_to(home).as_posix(): path.read_text()
             for path in home.rglob("*") if path.is_file()}  # fmt: skip
    assert found == files


def test_what_medusa_kit_wrote_may_be_replaced(tmp_path):
    (tmp_path / "verify.json").write_text(json.dumps({"greedy": {}}))
    check_file(tmp_path / "verify.json", "--output", has_keys("greedy"))
    check_file(tmp_path / "new/verify.json", "--output", has_keys("greedy"))
    check_folder(tmp_path / "new/folder", "--output")
    with pytest.raises(ConfigError, match="is a folder"):
        check_file(tmp_path, "--output")
    with pytest.raises(ConfigError, match="is a file"):
        check_folder(tmp_path / "verify.json", "--output")


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("drawn", ["now", "by an earlier version", "by another program"])
def test_pictures_are_known_by_what_they_say(monkeypatch, tmp_path, drawn, beside):
    plots = pytest.importorskip("medusa_kit.tuning.plots")
    path = tmp_path / "tree.png"
    if drawn == "by an earlier version":  # which left matplotlib's own words
        monkeypatch.setattr(plots, "SOFTWARE", "Matplotlib version3.10")
    plots.plot_acceptance([1, 2], [1.0, 1.5], path)
    if drawn == "by another program":
        path.write_bytes(path.read_bytes().replace(b"Software", b"Comments"))
    if beside:
        (tmp_path / "tree.json").write_text(FOUND)
    ours = is_picture("tree.json", has_keys("table"))
    expected = {"now": True, "by an earlier version": beside, "by another program": False}
    assert ours(path) == expected[drawn]
    assert not ours(tmp_path / "none.png")
