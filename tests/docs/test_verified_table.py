"""The table of verified families in docs/models.md is what `make verified` writes."""

import re
import shutil
from datetime import date
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from support.models import verified_families
from support.models.verified_families import (
    PAGE,
    PARTS,
    ROOT,
    found_stamps,
    found_table,
    main,
    table,
)
from support.tiny_models import EVERY


def test_the_page_has_the_table_of_the_suite() -> None:
    page = PAGE.read_text()
    assert found_table(page) == table(found_stamps(page))
    listed = {kind for part in PARTS for kind, _ in part.families.values()}
    assert {kind for kind, _ in EVERY.values()} <= listed


def test_each_row_was_verified_with_a_version_that_may_be_installed() -> None:
    (needed,) = re.findall(r'"(transformers[<>=][^"]+)"', (ROOT / "pyproject.toml").read_text())
    allowed = Requirement(needed).specifier
    stamps = found_stamps(PAGE.read_text())
    assert set(stamps) == {part.test for part in PARTS}
    for test, (version, day) in stamps.items():
        assert (ROOT / test).is_file()
        assert version in allowed, test
        date.fromisoformat(day)


def test_only_rows_whose_tests_pass_are_dated_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "models.md"
    shutil.copy(PAGE, copy)
    good, *bad = (part.test for part in PARTS)
    stamps = dict.fromkeys([good, *bad], ("5.17.0", "2020-01-02"))
    page = copy.read_text()
    copy.write_text(page.replace(found_table(page), table(stamps)))
    monkeypatch.setattr(verified_families, "passes", lambda test: test == good)
    assert main(copy) == 1
    after = found_stamps(copy.read_text())
    assert after.pop(good)[0] == transformers.__version__
    assert after == dict.fromkeys(bad, ("5.17.0", "2020-01-02"))
    monkeypatch.setattr(verified_families, "passes", lambda test: True)
    assert main(copy) == 0
    assert len(set(found_stamps(copy.read_text()).values())) == 1
    assert copy.read_text().replace(found_table(copy.read_text()), "") == page.replace(
        found_table(page), ""
    )
